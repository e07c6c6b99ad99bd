"""Fine-tune a Hugging Face model on chats with finetune_sft.py, and with the same loop written with transformers.

    python benchmarks/real_finetune.py FOLDER                        one process: SmolLM2-135M-Instruct takes some minutes
    python benchmarks/real_finetune.py FOLDER --layouts 1,tp3,pp2

FOLDER is what `save_pretrained` writes, with a tokenizer and a chat template. The chats are the first of those embedded: questions
about functions of Python's standard library. finetune_sft.py packs them into rows of 256 tokens, transformers takes each alone;
a step is the same chats for both, all in fp32. At the end transformers opens what was saved and answers.

transformers gives the looked-up row of `pad_token_id` no gradient, and in many models that token also ends a turn; here the row has
its gradient on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.options import at_least
from benchmarks.real_model import check, layout_of

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-3
QUESTION = "What does len() return in Python?"


def main() -> None:
    options = parse()
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # read when torch is imported: spinning threads are slow on a busy CPU
    print("  ".join(f"{name}: {value}" for name, value in describe_machine().items()), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "chats.jsonl"
        write_chats(data, options.chats)
        runs = {}
        for layout in options.layouts:
            rows = run_layout(options, layout, data, Path(scratch) / layout)
            runs[layout] = [row["loss"] for row in rows]
            print(f"Parallax {layout}: {rows[-1]['step_seconds']:.1f} s a step", flush=True)
        command = words(options, options.layouts[0], data, Path(scratch) / options.layouts[0])
        expected = train_in_transformers(options, command)
        print("| step | transformers | " + " | ".join(f"Parallax {layout}" for layout in runs) + " |")
        print("|---|---|" + "---|" * len(runs))
        for step, loss in enumerate(expected):
            print(f"| {step + 1} | {loss:.5f} | " + " | ".join(f"{found[step]:.5f}" for found in runs.values()) + " |")
        far = {
            layout: max(abs(a - b) / b for a, b in zip(found, expected, strict=True)) for layout, found in runs.items()
        }
        print("largest relative difference: " + ", ".join(f"{layout} {worst:.1e}" for layout, worst in far.items()))
        (saved,) = (Path(scratch) / options.layouts[-1] / "checkpoints").glob("step-*/model")
        print(f"{QUESTION}\n    before: {answer(options.folder)}\n    after:  {answer(saved)}")
    sys.exit(0 if max(far.values()) < TOLERANCE and expected[-1] < expected[0] else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Hugging Face model's folder")
    parser.add_argument("--layouts", default="1", help="with commas between, as in 1,tp3,pp2 (default: 1)")
    parser.add_argument("--chats", type=at_least(1), default=200, help="how many (default: 200)")
    parser.add_argument("--rows", type=at_least(1), default=3, help="in a step (default: 3)")
    parser.add_argument("--steps", type=at_least(1), default=20, help="(default: 20)")
    options = parser.parse_args()
    check(parser, options)
    options.folder = options.folder.resolve()
    return options


def write_chats(path: Path, count: int) -> None:
    import itertools

    from parallax.data.chat.instruct import standard_library_chats
    from parallax.data.corpus import standard_library

    chats = itertools.islice(standard_library_chats(standard_library()), count)
    path.write_text("".join(json.dumps({"messages": list(chat.messages)}) + "\n" for _, _, chat in chats))


def words(options: argparse.Namespace, layout: str, data: Path, out: Path) -> list[str]:
    sizes = layout_of(layout)
    return [
        *("--init", str(options.folder), "--data", str(data), "--out", str(out), "--steps", str(options.steps)),
        *("--global-batch", str(options.rows), "--micro-batch", "1"),
        *("--seq-len", "256", "--eval-fraction", "0", "--eval-every", "0"),
        *("--tp", str(sizes.tp), "--pp", str(sizes.pp)),
    ]


def run_layout(options: argparse.Namespace, layout: str, data: Path, out: Path) -> list[dict[str, Any]]:
    ranks = layout_of(layout).world_size
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(ROOT / "finetune_sft.py"), *words(options, layout, data, out)]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    run = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": threads}, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train_in_transformers(options: argparse.Namespace, command: list[str]) -> list[float]:
    """Return the losses of the same steps: the same chats in the same order, learning rates and optimizer, one chat at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from parallax.data.chat.prepare import prepare_chats
    from parallax.data.loader import BatchLoader
    from parallax.resolve import parse_finetune
    from parallax.training.lr import learning_rate

    config = parse_finetune(command)
    data = prepare_chats(config.data, config.training.seq_len)
    loader = BatchLoader(data.train, config.training.seed, config.training.global_batch, 1)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    asked, started = config.optimizer, time.perf_counter()
    decays = {
        True: [p for p in model.parameters() if p.dim() == 2],
        False: [p for p in model.parameters() if p.dim() != 2],
    }
    optimizer = torch.optim.AdamW(
        [{"params": found, "weight_decay": asked.weight_decay if decay else 0.0} for decay, found in decays.items()],
        betas=(asked.beta1, asked.beta2),
        eps=asked.eps,
    )
    losses = []
    for step in range(options.steps):
        rows = loader.micro_batches(step)
        weight, total = sum(int((row["labels"] != -100).sum()) for row in rows), 0.0
        for ids, labels in (chat for row in rows for chat in chats_of(row)):
            logits = model(ids[None]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / weight
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), asked.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.learning_rate)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    print(f"transformers: {(time.perf_counter() - started) / options.steps:.1f} s a step", flush=True)
    return losses


def chats_of(row: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and labels of each chat of a packed row, without the padding."""
    lengths = row["documents"][0].unique_consecutive(return_counts=True)[1].tolist()
    for ids, labels in zip(row["input_ids"][0].split(lengths), row["labels"][0].split(lengths), strict=True):
        if (labels != -100).any():
            yield ids, labels


def answer(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    text: str = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


if __name__ == "__main__":
    main()

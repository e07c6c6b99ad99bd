"""Compare a Hugging Face model's logits in Parallax with transformers', layout by layout.

    python benchmarks/real_model.py FOLDER                        one process, tp 3, pp 2, tp 2: for SmolLM2-135M
    python benchmarks/real_model.py FOLDER --layouts 1,tp2,tp2pp2

FOLDER is what `save_pretrained` writes. Each layout reads the folder straight into its ranks, each its slices, and computes the
logits of the same 2 x 128 tokens, this file's text, in fp32. Two roundings of the same numbers differ, and by how much tells
transformers itself: the first rows compare its two ways to compute attention, and its fp32 with its float64. A layout is good
when every logit is within 1e-4, absolute or relative. One that the model does not divide into says so; that is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from parallax.errors import ConfigError, exit_with_problems
from parallax.mesh import Layout, Mesh, connect

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-4
BATCH, SEQ_LEN = 2, 128


def main() -> None:
    options = parse()
    if options.save is not None:
        save_logits(options)
        return
    import numpy as np

    print("  ".join(f"{name}: {value}" for name, value in describe_machine().items()), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        ids = token_ids(options.folder)
        np.save(Path(scratch) / "ids.npy", ids)
        rows = compare_transformers(options.folder, ids, Path(scratch) / "expected.npy")
        print("| | largest difference | largest logit | within 1e-4 | same next token |\n|---|---|---|---|---|")
        print("\n".join(rows), flush=True)
        good = True
        expected = np.load(Path(scratch) / "expected.npy")
        for layout in options.layouts:
            found, said = run_layout(options.folder, layout, Path(scratch))
            if found is None:
                print(f"| Parallax {layout} | {said} | | | |", flush=True)
                continue
            print(row_of(f"Parallax {layout}", found, expected), flush=True)
            good = good and np.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    sys.exit(0 if good else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Hugging Face model's folder")
    parser.add_argument("--layouts", default="1,tp3,pp2,tp2", help="with commas between (default: 1,tp3,pp2,tp2)")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)  # of one rank of a layout, as this file starts it
    options = parser.parse_args()
    check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command if its folder is no model's, or a layout is none; else make a list of `options.layouts`."""
    options.layouts = options.layouts.split(",")
    for layout in options.layouts:
        if not re.fullmatch(r"1|(tp[1-9]\d*)?(pp[1-9]\d*)?", layout) or not layout:
            parser.error(f"--layouts {layout} is unknown; write 1, tp2, pp2 or tp2pp2")
    if not (options.folder / "config.json").is_file():
        parser.error(f"{options.folder} holds no config.json; give a Hugging Face model's folder")
    if importlib.util.find_spec("transformers") is None:
        parser.error("it is compared with transformers, which is not installed: pip install transformers")


def layout_of(name: str) -> Layout:
    sizes = {axis: int(size) for axis, size in re.findall(r"(tp|pp)(\d+)", name)}
    return Layout(**sizes)


def token_ids(folder: Path):
    """Return `[BATCH, SEQ_LEN]` ids of this file's text, repeated if it is too short."""
    import numpy as np
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(Path(__file__).read_text(encoding="utf-8"))["input_ids"]
    return np.resize(np.array(ids, dtype=np.int64), (BATCH, SEQ_LEN))


def compare_transformers(folder: Path, ids, save_to: Path) -> list[str]:
    """Save the logits that transformers computes; return the rows of its own differences."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    results = {}
    for dtype, attention in ((torch.float32, "sdpa"), (torch.float32, "eager"), (torch.float64, "sdpa")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
        with torch.no_grad():
            results[dtype, attention] = model(torch.from_numpy(ids)).logits.numpy()
    expected = results[torch.float32, "sdpa"]
    np.save(save_to, expected)
    return [
        row_of("transformers, attention written out", results[torch.float32, "eager"], expected),
        row_of("transformers, float64", results[torch.float64, "sdpa"], expected),
    ]


def row_of(name: str, found, expected) -> str:
    import numpy as np

    difference = np.abs(found - expected)
    close = np.isclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE).mean()
    same = (found.argmax(-1) == expected.argmax(-1)).mean()
    return f"| {name} | {difference.max():.1e} | {np.abs(expected).max():.1f} | {close:.2%} | {same:.1%} |"


def run_layout(folder: Path, layout: str, scratch: Path):
    """Return the logits that the ranks of a layout computed, or None and what they said instead."""
    import numpy as np

    ranks = layout_of(layout).world_size
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, __file__, str(folder), "--layouts", layout, "--save", str(scratch)]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    (scratch / "logits.npy").unlink(missing_ok=True)
    run = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": threads}, capture_output=True, text=True)
    if run.returncode == 0:
        return np.load(scratch / "logits.npy"), ""
    said = re.findall(r"real_model.py: error: (.*)", run.stderr)
    if not said:
        sys.exit(run.stderr)
    return None, said[0]


def save_logits(options: argparse.Namespace) -> None:
    """One rank of a layout."""
    import numpy as np
    import torch

    ids = torch.from_numpy(np.load(options.save / "ids.npy"))
    try:
        with connect(layout_of(options.layouts[0])) as mesh:
            logits = compute_logits(mesh, options.folder, ids)
            if logits is not None and mesh.tp_rank == 0:
                np.save(options.save / "logits.npy", logits.numpy())
    except ConfigError as error:
        exit_with_problems(error.problems, "real_model.py")


def compute_logits(mesh: Mesh, folder: Path, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits `[batch, seq, vocab]` of a model folder on the ranks of the last stage; called by all ranks.

    Raises ConfigError, on all of them, if the model cannot be cut up so, or cannot be read.
    """
    import torch

    from parallax.checkpoint.initial_weights import load_weights
    from parallax.checkpoint.parts import CheckpointParts
    from parallax.collectives import all_gather
    from parallax.models.hugging_face_config import read_hugging_face_config
    from parallax.models.stages import build_stages
    from parallax.pipeline.executor import PipelineExecutor
    from parallax.pipeline.schedules import SCHEDULES
    from parallax.tensor_parallel.facts import named_parameters_with_facts
    from parallax.training.stages import stage_ranges

    config = read_hugging_face_config(folder)
    problems = config.check(mesh.layout, ids.shape[1], sequence_parallel=False)
    if problems:
        raise ConfigError(problems)
    schedule = SCHEDULES["gpipe"](mesh.layout.pp, 1)
    layers = stage_ranges(config, mesh.layout.pp, None, ids.shape[1])
    stages = build_stages(
        config,
        layers,
        schedule.holders,
        mesh.pp_rank,
        seed=None,
        device=mesh.device,
        dtype=torch.float32,
        tp=mesh.tp,
    )
    parameters = [entry for stage in stages.values() for entry in named_parameters_with_facts(stage, mesh.tp)]
    load_weights(folder, CheckpointParts(config, parameters), mesh)
    results: list[torch.Tensor] = []

    def run(index: int, hidden: torch.Tensor | None) -> torch.Tensor:
        output = stages[index](ids.to(mesh.device) if index == 0 else hidden)
        if index < schedule.num_stages - 1:
            return output
        results.append(all_gather(output, mesh.tp, 2)[..., : config.vocab_size].cpu())
        return output.sum()

    functions = {index: lambda hidden, _, index=index: run(index, hidden) for index in stages}
    executor = PipelineExecutor(schedule, mesh.pp, functions, None, mesh.device)
    with torch.no_grad():
        executor.run(executor.prepare(schedule.forwards()))
    return results[0] if results else None


if __name__ == "__main__":
    main()

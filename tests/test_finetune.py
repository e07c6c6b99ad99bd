"""finetune_sft.py from end to end: against the same loop in transformers, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune_sft
import pretrain
from parallax.config import FinetuneOptions, PretrainOptions, RunConfig
from parallax.data.loader import BatchLoader
from parallax.data.order import DataOrder
from parallax.mesh import Layout, Mesh
from parallax.resolve import read_options, resolve
from parallax.training.lr import learning_rate
from tests.data.chat.tokenizers_of_the_test import CHATML, CHATML_WITH_GENERATION, byte_level, save
from tests.distributed.harness import run_layout
from tests.training.chats import NUM_CHATS, SMOL, chat, run, save_model, write_chats
from tests.training.runs import before_data, contents, metrics

transformers = pytest.importorskip("transformers", reason="the reference; the test extra brings it")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats.jsonl")
    save_model(tmp_path / "smol", SMOL)
    return tmp_path


def config_of(words: str) -> RunConfig:
    options, problems = read_options(words.split(), FinetuneOptions)
    assert not problems
    return resolve(options, 1)


def masked_ids(tokenizer: Any, messages: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of a chat, and its labels, shifted, by the marks that the template has for transformers."""
    found = tokenizer.apply_chat_template(
        messages, chat_template=CHATML_WITH_GENERATION, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, learned = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"])
    return ids[None, :-1], torch.where(learned == 1, ids, -100)[None, 1:]


def losses_of_transformers(folder: Path, config: RunConfig, samples: list[list[int]]) -> list[float]:
    """Train as config says, each chat alone, in a loop of torch and transformers; samples: the chats of each step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "smol")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "smol", dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    asked = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": asked.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(asked.beta1, asked.beta2),
        eps=asked.eps,
    )
    losses = []
    for step, chats in enumerate(samples):
        batch = [masked_ids(tokenizer, chat(i)) for i in chats]
        weight = sum(int((labels != -100).sum()) for _, labels in batch)
        total = 0.0
        for ids, labels in batch:
            logits = model(ids).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum") / weight
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), asked.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.learning_rate)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_twenty_steps_lower_the_loss_as_the_same_loop_in_transformers_does(folder: Path) -> None:
    words = (
        f"--init {folder}/smol --data {folder}/chats.jsonl --steps 20 --global-batch 6 --seq-len 96 "
        f"--no-packing --eval-fraction 0 --eval-every 0 --lr 2e-3 --out {folder}/run"
    )
    ((rows,),) = run_layout(Layout(), run, [words], timeout=120)
    config = config_of(words)
    data = finetune_sft.prepare_chats(config.data, 96)  # type: ignore[arg-type]
    order = DataOrder(0, data.train.fingerprint, NUM_CHATS)
    steps = [order.samples(6 * step, 6).tolist() for step in range(20)]  # 24 chats: 5 epochs, in permutations
    expected = losses_of_transformers(folder, config, steps)
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.6 * expected[0]

    model_folder = folder / "run" / "checkpoints" / "step-00000020" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    assert model.config.tie_word_embeddings and model.config.eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(
        chat(4)[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("it is ") and answer[-1] == tokenizer.eos_token_id


def test_a_run_that_goes_on_is_the_unbroken_one(folder: Path) -> None:
    common = (
        f"--init {folder}/smol --data {folder}/chats.jsonl --seq-len 64 --steps 4 --eval-every 2 --eval-fraction 0.2"
    )
    ((whole, first, rest),) = run_layout(
        Layout(),
        run,
        [
            f"{common} --out {folder}/whole",
            f"{common.replace('--steps 4', '--steps 2 --lr-decay-steps 4 --warmup-steps 1')} --out {folder}/parts",
            f"{common} --lr-decay-steps 4 --out {folder}/parts",
        ],
        timeout=120,
    )
    assert [row["loss"] for row in whole[:2]] == [row["loss"] for row in first]
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole]
    assert [row.get("eval_loss") for row in rest] == [row.get("eval_loss") for row in whole]
    assert whole[3]["eval_loss"] < whole[1]["eval_loss"]
    names = ("whole", "parts")
    ends = [contents(folder / name / "checkpoints" / "step-00000004") for name in names]
    assert ends[0] == ends[1]
    assert {"model/chat_template.jinja", "model/generation_config.json", "model/tokenizer.json"} <= ends[0].keys()


def nothing_learned_at(mesh: Mesh, step: int, commands: list[str]) -> list:
    """Train with a step, counted from 0, in whose batch nothing is to be learned."""
    current = [-1]
    before_data(lambda loader, now: current.__setitem__(0, now))
    original = BatchLoader._micro_batch

    def without_labels(self, now: int, m: int) -> dict[str, torch.Tensor]:
        batch = original(self, now, m)
        return batch | {"labels": torch.full_like(batch["labels"], -100)} if now == step else batch

    BatchLoader._micro_batch = without_labels  # type: ignore[method-assign]
    return run(mesh, commands)


def test_a_step_without_a_learned_token_changes_nothing_and_is_counted(folder: Path) -> None:
    """Fault 32: no NaN, no loss of 0.0 in the log."""
    words = f"--init {folder}/smol --data {folder}/chats.jsonl --seq-len 64 --steps 3 --eval-every 0 --lr 1e-3 --out {folder}/run"
    ((rows,),) = run_layout(Layout(), nothing_learned_at, 1, [words], timeout=120)
    assert [row["step"] for row in rows] == [1, 3] and all(row["loss"] > 1 for row in rows)
    (skipped,) = map(json.loads, (folder / "run" / "skipped.jsonl").read_text().splitlines())
    assert skipped["step"] == 2
    state = json.loads((folder / "run" / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert state["training"]["counters"]["skipped"] == 1 and state["optimizer"]["step_count"] == 2


def test_the_default_starts_from_what_the_default_pretraining_left(folder: Path) -> None:
    fresh = config_of("")
    assert fresh.init is None and "runs/tiny holds no checkpoint" in fresh.describe_start()
    assert fresh.out == Path("runs/tiny-sft") and fresh.model_config.vocab_size == 4096
    words = f"--data {folder}/chats.jsonl --init {folder}/smol --seq-len 64 --steps 1 --eval-every 0 --out runs/tiny"
    run_layout(Layout(), run, [words], timeout=120)
    config = config_of("")
    assert config.init == Path("runs/tiny/checkpoints/step-00000001/model")
    assert config.model_config.num_attention_heads == 9 and config.data.tokenizer == str(config.init)
    assert config_of("--init none").init is None and config_of("--layers 2").init is None


REFUSED: dict[str, tuple[str, str]] = {
    "no such data": ("--data {0}/none.jsonl", "--data {0}/none.jsonl: there is no such file"),
    "no such model": ("--init {0}/none", "--init {0}/none: there is no folder"),
    "no model": ("--init {0}/empty", "--init {0}/empty: {0}/empty holds neither a checkpoint nor config.json"),
    "sizes": ("--layers 2 --heads 3", "--init takes the model as it is; leave out --layers, --heads"),
    "broken": ("--data {0}/broken.jsonl", "{0}/broken.jsonl, line 2"),
    "no assistant": ("--data {0}/no_assistant.jsonl", "{0}/no_assistant.jsonl, line 1"),
    "template": (
        "--template {0}/silent.jinja",
        "writes nothing of what the assistant says, so no token would be trained",
    ),
    "too many ids": ("--tokenizer {0}/large", "of 400 ids, has no room for the 600 ids of the tokenizer"),
    "too long": ("--seq-len 513", "--seq-len 513 is longer than the 512 positions of the model"),
    "all too long": ("--seq-len 8", "none of the 24 chats of {0}/chats.jsonl is left"),
    "one too long": ("--seq-len 40 --too-long error", "raise --seq-len, or use --too-long drop or truncate"),
    "no loss": ("--loss-per turn", "--loss-per turn is unknown; use token or sample"),
    "missing tensor": ("--init {0}/part", "--init {0}/part does not hold this run's model: it lacks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_user_error_is_one_sentence_before_a_model_is_built(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors.torch

    import parallax.training.build

    monkeypatch.setattr(parallax.training.build, "build_train_step", None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    (folder / "broken.jsonl").write_text(
        (folder / "chats.jsonl").read_text()[:200].split("\n")[0] + '\n{"messages": [\n'
    )
    (folder / "no_assistant.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (folder / "empty").mkdir()
    (folder / "silent.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    if case == "too many ids":
        more = byte_level()
        more.add_tokens([f"<{i}>" for i in range(200)])
        save(more, folder / "large", CHATML)
    if case == "missing tensor":
        tensors = safetensors.torch.load_file(folder / "smol" / "model.safetensors")
        tensors.pop("model.norm.weight")
        (folder / "part").mkdir()
        for file in (folder / "smol").iterdir():
            (folder / "part" / file.name).write_bytes(file.read_bytes())
        safetensors.torch.save_file(tensors, folder / "part" / "model.safetensors")
    words, sentence = REFUSED[case]
    given = f"--data {folder}/chats.jsonl --init {folder}/smol --seq-len 64 --out {folder}/run".split()
    asked = words.format(folder).split()
    for flag in asked[::2]:
        if flag in given:
            at = given.index(flag)
            del given[at : at + 2]
    with pytest.raises(SystemExit) as stopped:
        finetune_sft.main([*given, *asked])
    assert stopped.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("parallax: prepar")]
    assert len(said) == 1 and said[0].startswith("finetune_sft.py: error: ") and sentence.format(folder) in said[0], (
        said
    )


def test_a_run_says_when_it_is_of_the_other_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text.txt").write_text("hello there, hello world. " * 2000)
    words = f"--init {folder}/smol --data {folder}/chats.jsonl --seq-len 64 --steps 1 --eval-every 0 --out {folder}/run"
    run_layout(Layout(), run, [words], timeout=120)
    with pytest.raises(SystemExit):
        pretrain.main(
            f"{words} --data {folder}/text.txt --resume auto".replace(f"--data {folder}/chats.jsonl ", "").split()
        )
    assert "program was finetune_sft.py and is now pretrain.py" in capsys.readouterr().err


def test_pretraining_goes_on_from_a_model_of_transformers(folder: Path) -> None:
    (folder / "text.txt").write_text("hello there, hello world: what is it? it is a test. " * 200)
    words = f"--init {folder}/smol --data {folder}/text.txt --seq-len 32 --steps 1 --eval-every 0 --global-batch 4"
    options, _ = read_options(words.split(), PretrainOptions)
    config = resolve(options, 1)
    assert config.out == Path("runs/smol-pretrain") and config.model_config.vocab_size == 400
    data = pretrain.prepare_data(config.data, 32)
    run_layout(Layout(), pretrain_once, words, timeout=120)
    (row,) = metrics(config.out)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "smol", dtype=torch.float32)
    batches = BatchLoader(data.train, 0, 4, 4).micro_batches(0)
    logits = model(batches[0]["input_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batches[0]["labels"].flatten())
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)


def pretrain_once(mesh: Mesh, words: str) -> None:
    config = resolve(read_options(words.split(), PretrainOptions)[0], 1)
    pretrain.train(config, pretrain.prepare_data(config.data, 32), mesh)

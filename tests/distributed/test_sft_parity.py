"""What is learned from chats does not depend on how they are laid out: in rows, in micro-batches, on ranks, in stages.

A step of each run is all 24 chats, so that packed and unpacked runs learn from the same ones. The reference is one process, padding
each chat to a row of its own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from parallax.mesh import Layout
from tests.distributed.harness import run_layout
from tests.training.chats import EVEN, NUM_CHATS, SMOL, run, save_model, write_chats

pytest.importorskip("transformers", reason="the models and their tokenizers are made with transformers")

STEPS = 2
UNPACKED = f"--no-packing --global-batch {NUM_CHATS} --seq-len 96"
PACKED = "--global-batch 8 --seq-len {packed}"  # the length at which the chats fill exactly 8 rows
PER_SAMPLE = "--loss-per sample"

# Layout, model, and what is asked of it; that the answer is the same.
CASES: list[tuple[Layout, str, list[str]]] = [
    (
        Layout(),
        "smol",
        [
            f"{UNPACKED} --micro-batch 8 --recompute full",
            UNPACKED.replace("96", "131") + " --micro-batch 3",  # more padding
            f"{PACKED} --micro-batch 1",
            f"{PACKED} --micro-batch 8",
            f"{PACKED} {PER_SAMPLE}",
        ],
    ),
    (Layout(dp=2), "smol", [f"{PACKED} --zero 2 --micro-batch 1", f"{UNPACKED} --zero 0 {PER_SAMPLE}"]),
    (Layout(tp=3), "smol", [f"{PACKED} --sp", f"{UNPACKED} {PER_SAMPLE} --sp --recompute selective"]),
    (
        Layout(pp=2),
        "smol",
        [
            f"{PACKED} --micro-batch 1",
            f"{UNPACKED} --schedule zb-v",
            f"{PACKED} --schedule dualpipev --micro-batch 1 {PER_SAMPLE}",
        ],
    ),
    (Layout(tp=2, pp=2), "even", [f"{PACKED} --sp --micro-batch 1", f"{PACKED} --schedule zb-h1 --micro-batch 2"]),
    (Layout(pp=2, dp=2), "even", [f"{PACKED} --schedule dualpipe --micro-batch 1 --zero 2"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    write_chats(folder / "chats.jsonl")
    save_model(folder / "smol", SMOL)
    save_model(folder / "even", EVEN)
    return folder


@cache
def packed_length(folder: Path) -> int:
    """Return the least --seq-len at which the chats are packed into 8 rows."""
    from parallax.data.chat.options import ChatOptions
    from parallax.data.chat.prepare import prepare_chats

    options = ChatOptions(
        data=(f"{folder}/chats.jsonl",), tokenizer=f"{folder}/smol", template="chatml", eval_fraction=0
    )
    lengths = prepare_chats(options, 512).train.samples.lengths  # type: ignore[union-attr]
    start = -(-int(lengths.sum()) // 8)
    return next(n + -n % 6 for n in range(start, 512) if len(prepare_chats(options, n + -n % 6).train) == 8)


def command(folder: Path, model: str, words: str, number: str) -> str:
    common = f"--init {folder}/{model} --data {folder}/chats.jsonl --eval-fraction 0 --eval-every 0 --steps {STEPS}"
    return f"{common} {words.format(packed=packed_length(folder))} --template chatml --lr 2e-3 --out {folder}/{number}"


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[tuple[str, bool], list[dict]]:
    kinds = [(model, per_sample) for model in ("smol", "even") for per_sample in (False, True)]
    words = [f"{UNPACKED} --micro-batch 4 --zero 0 {PER_SAMPLE if per_sample else ''}" for _, per_sample in kinds]
    commands = [
        command(folder, kind[0], words, f"reference{i}")
        for i, (kind, words) in enumerate(zip(kinds, words, strict=True))
    ]
    return dict(zip(kinds, run_layout(Layout(), run, commands, timeout=120)[0], strict=True))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{layout}-{model}" for layout, model, _ in CASES])
def test_losses_and_norms_are_those_of_padded_rows_in_one_process(
    folder: Path, references: dict[tuple[str, bool], list[dict]], case: int
) -> None:
    layout, model, asked = CASES[case]
    sizes = f"--tp {layout.tp} --pp {layout.pp}"
    commands = [command(folder, model, f"{words} {sizes}", f"case{case}-{i}") for i, words in enumerate(asked)]
    for words, rows in zip(asked, run_layout(layout, run, commands, timeout=120)[0], strict=True):
        reference = references[model, PER_SAMPLE in words]
        assert len(rows) == STEPS, rows
        assert rows[-1]["loss"] < rows[0]["loss"]
        for row, expected in zip(rows, reference, strict=True):
            for name in ("loss", "grad_norm", "tokens"):
                assert row[name] == pytest.approx(expected[name], rel=1e-5), f"{words}, step {row['step']}, {name}"


def test_nine_heads_do_not_divide_by_two(folder: Path) -> None:
    from parallax.config import FinetuneOptions
    from parallax.resolve import check, read_options

    options, _ = read_options(command(folder, "smol", f"{UNPACKED} --tp 2", "x").split(), FinetuneOptions)
    assert "--tp 2 must divide num_attention_heads=9; use 1, 3 or 9" in check(options, 2)

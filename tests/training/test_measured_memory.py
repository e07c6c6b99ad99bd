"""The report of memory: what the planner says to the byte, and of activations what autograd keeps."""

from __future__ import annotations

import pytest
import torch

from parallax.config import PretrainConfig
from parallax.mesh import Layout, Mesh
from parallax.objectives.next_token import NextToken
from parallax.training.build import build_train_step
from parallax.training.measured_memory import KeptMemory, MemoryReport
from parallax.training.plan import make_plan
from tests.distributed.harness import run_layout
from tests.training.test_plan import SMALL, config_of

ALONE = [
    f"{SMALL} --global-batch 4 --recompute {recompute} --precision {precision} {chunk}"
    for recompute in ("none", "selective", "full")
    for precision in ("fp32", "bf16")
    for chunk in ("", "--loss-chunk 8")
]
SHARDED = [
    f"{SMALL} --tp 2 --pp 2 --global-batch 8 {words}"
    for words in ("--zero 1 --sp", "--zero 2 --precision bf16", "--zero 3 --optimizer sgd", "--schedule gpipe --zero 0")
]
# Forward and backward take turns where tensor parallelism cuts a layer.
PAIRED = [
    f"{SMALL} --tp 2 --pp 2 --global-batch 8 --micro-batch 1 --schedule {words}"
    for words in (
        "dualpipe --sp",
        "dualpipev --sp",
        "dualpipev",
        "interleaved-paired --sp",
        "interleaved-paired --sp --recompute selective --loss-chunk 8",
        "interleaved-paired --sp --recompute full",
    )
]


def _measured(mesh: Mesh, cases: list[str]) -> list[dict[str, int]]:
    return [_measure(mesh, config_of(words)) for words in cases]


def _measure(mesh: Mesh, config: PretrainConfig) -> dict[str, int]:
    training, vocabulary = config.training, config.model_config.vocab_size
    step = build_train_step(
        mesh,
        config.model_config,
        config.stage_ranges,
        config.schedule,
        training,
        config.optimizer,
        NextToken(vocabulary, mesh.tp),
        sequence_parallel=config.parallel.sp,
        fp8=config.fp8,
    )
    ids = torch.randint(0, vocabulary, (training.micro_batch, training.seq_len))
    batches = [{"input_ids": ids, "labels": ids}] * config.num_micro_batches
    step(batches, 1e-3)  # makes the tables of rotary positions
    report = MemoryReport(step.buckets, step.optimizer, step.fp8)
    with report.watching():
        step(batches, 1e-3)
    return report.parts()


def _check(cases: list[str], layout: Layout) -> None:
    plans = [make_plan(config_of(words)) for words in cases]
    for rank, row in enumerate(run_layout(layout, _measured, cases)):
        for words, plan, parts in zip(cases, plans, row, strict=True):
            planned = plan.ranks[layout.coordinates(rank)["pp"]].memory
            for name in ("weights", "gradients", "optimizer"):
                assert parts[name] == getattr(planned, name), (words, rank, name)
            # Beside the formula there are labels, positions and what the loss keeps of each token.
            assert 0.95 < parts["activations"] / planned.activations < 1.1, (words, rank, parts, planned)
            assert parts["other"] > 0


def test_a_process_holds_what_the_plan_says() -> None:
    _check(ALONE, Layout())


def test_each_rank_holds_what_the_plan_says() -> None:
    _check(SHARDED, Layout(tp=2, pp=2))


@pytest.mark.parametrize("cases", [PAIRED[1:2], pytest.param(PAIRED, marks=pytest.mark.slow)], ids=["one", "all"])
def test_pairs_keep_no_more_than_the_plan_says(cases: list[str]) -> None:
    _check(cases, Layout(tp=2, pp=2))


def test_kept_memory_counts_blocks_once_while_they_are_kept() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    kept = KeptMemory(lambda: {weight.untyped_storage().data_ptr()})
    input = torch.randn(4, 8)
    with kept.watching():
        output = (input @ weight).exp()  # keeps the input and its own output
        both = output[:2].sin().sum() + output[2:].cos().sum()  # two views of one block
        assert kept.bytes == 2 * 4 * 8 * 4
        both.backward()
        del output, both
    assert kept.bytes == 0 and kept.peak == 2 * 4 * 8 * 4


WIDTHS = "--hidden 64 --heads 4 --kv-heads 2 --ffn 192"
EIGHT_BITS = f"--tokenizer bytes --layers 8 {WIDTHS} --seq-len 16 --precision fp8 --global-batch 8 --micro-batch 1"
COPIES = {
    Layout(): ["", "--recompute full", "--fp8-recipe delayed", "--zero 3"],
    # 192 features over 2 ranks are cut inside of a tile, and the second rank begins inside of one.
    Layout(tp=2): [
        *("--tp 2", "--tp 2 --sp", "--tp 2 --fp8-recipe delayed --fp8-keep layers.0 down_proj"),
        # The norms of a layer are gathered for each use, and its matrices are not.
        *("--tp 2 --zero 3", "--tp 2 --sp --zero 3 --recompute full"),
    ],
    Layout(dp=2): [
        *("--zero 1", "--zero 2", "--zero 3", "--zero 3 --fp8-recipe delayed", "--zero 3 --recompute full"),
    ],
    Layout(pp=2, dp=2): [
        "--pp 2 --zero 3",
        "--pp 2 --zero 3 --schedule zb-v --fp8-keep layers.0",
        "--pp 2 --zero 3 --schedule dualpipe",
    ],
    # Four ranks share two key-value heads: k and v, which stay in bf16, are gathered as the norms are.
    Layout(tp=4): ["--tp 4 --sp --zero 3 --fp8-keep k_proj v_proj"],
    Layout(tp=2, pp=2): [
        "--tp 2 --pp 2 --sp --zero 3 --schedule dualpipe",
        "--tp 2 --pp 2 --zero 3 --fp8-keep layers.0",
    ],
}


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.slow) if one.world_size > 1 else one for one in COPIES], ids=str
)
def test_the_copies_of_weights_in_fp8_take_what_the_plan_says_to_the_byte(layout: Layout) -> None:
    cases = [f"{EIGHT_BITS} --dp {layout.dp} {words}" for words in COPIES[layout]]
    measured = run_layout(layout, _measured, cases, timeout=200)
    for place, words in enumerate(cases):
        for pp_rank, planned in enumerate(make_plan(config_of(words)).ranks):
            held = [
                row[place]["fp8 weights"]
                for rank, row in enumerate(measured)
                if layout.coordinates(rank)["pp"] == pp_rank
            ]
            assert planned.memory.fp8_weights == max(held) > 0, (words, pp_rank, held)


def test_under_zero_3_copies_of_weights_in_fp8_are_those_of_one_layer() -> None:
    cases = [f"{EIGHT_BITS} --dp 2 --zero {zero}" for zero in (2, 3)]
    for two, three in run_layout(Layout(dp=2), _measured, cases):
        assert two["fp8 weights"] == 8 * three["fp8 weights"]


@pytest.mark.slow
def test_a_pair_of_a_forward_and_a_backward_has_the_copies_of_two_layers_at_most() -> None:
    words = f"{EIGHT_BITS} --tp 2 --pp 2 --dp 2 --zero 3 --schedule dualpipe"
    layout = Layout(tp=2, pp=2, dp=2)
    one_layer = make_plan(config_of(words.replace("dualpipe", "1f1b"))).ranks[0].memory.fp8_weights
    plan = make_plan(config_of(words))
    assert {rank.memory.fp8_weights for rank in plan.ranks} == {2 * one_layer}
    for (parts,) in run_layout(layout, _measured, [words], timeout=200):
        assert one_layer < parts["fp8 weights"] <= 2 * one_layer

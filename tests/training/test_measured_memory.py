"""The report of memory: what the planner says to the byte, and of activations what autograd keeps."""

from __future__ import annotations

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
    )
    ids = torch.randint(0, vocabulary, (training.micro_batch, training.seq_len))
    batches = [{"input_ids": ids, "labels": ids}] * config.num_micro_batches
    step(batches, 1e-3)  # makes the tables of rotary positions
    report = MemoryReport(step.buckets, step.optimizer)
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

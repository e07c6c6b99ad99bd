"""Parameters that are still on their way when a step ends: the next forward waits for them, and so does whoever reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallax.mesh import Layout, Mesh
from parallax.training.record import StepRecorder, shares_of
from tests.distributed.harness import run_layout
from tests.distributed.test_parity import GPT, QWEN3, TIED
from tests.distributed.training import Case, build, loader_of, train

STEPS = Case(steps=4, micro_batch=1)
CASES = {
    "dp2": (Layout(dp=2), [replace(STEPS, model=GPT), replace(STEPS, zero=2, model=TIED, precision="bf16")]),
    "tp2": (Layout(tp=2), [replace(STEPS, sp=True, model=QWEN3)]),
    "pp2 dp2": (Layout(pp=2, dp=2), [replace(STEPS, model=TIED), replace(STEPS, schedule="dualpipe", zero=2)]),
}


def _over_sockets(mesh: Mesh) -> Mesh:
    """The same ranks without shared memory, in which nothing is ever under way."""
    return Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)


def _both(mesh: Mesh, cases: list[Case]) -> list[Any]:
    mesh = _over_sockets(mesh)
    return [[train(mesh, replace(case, overlap_gather=overlap)) for overlap in (False, True)] for case in cases]


@pytest.mark.parametrize("name", CASES)
def test_overlapped_gathering_changes_no_bit(name: str) -> None:
    layout, cases = CASES[name]
    for rank in run_layout(layout, _both, cases):
        for waited, overlapped in rank:
            assert waited == overlapped


def _one_ahead(mesh: Mesh, reader: str) -> bool:
    """Rank 0 ends a step before rank 1 has sent anything of it; what it then reads has arrived all the same."""
    mesh = _over_sockets(mesh)
    step, loader = build(mesh, STEPS), loader_of(mesh, STEPS)
    store = dist.distributed_c10d._get_default_store()
    if mesh.rank == 1:
        plain = step.optimizer.step

        def late(*arguments: Any) -> None:
            store.wait(["rank 0 is done"])
            plain(*arguments)

        step.optimizer.step = late  # type: ignore[method-assign]
    step(loader.micro_batches(0), 1e-2)
    if mesh.rank == 0:
        store.set("rank 0 is done", "")
    name = step.parameters[0][0]
    if reader == "forward":
        batch = loader.micro_batches(1)[0]
        with torch.no_grad():
            return bool(torch.isfinite(step.runner.stages[0](batch["input_ids"])).all())
    assert step.optimizer.weights(name) is None
    mine = step.parameters[0][1].detach().clone().view(torch.int32).long().sum().view(1)
    sums = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(sums, mine)
    return bool(sums[0] == sums[1])


@pytest.mark.parametrize("reader", ["forward", "checkpoint"])
def test_a_step_ends_while_parameters_are_on_their_way(reader: str) -> None:
    assert run_layout(Layout(dp=2), _one_ahead, reader) == [True, True]


def _shares(mesh: Mesh) -> list[dict[str, Any]]:
    mesh = _over_sockets(mesh)
    step, loader = build(mesh, STEPS), loader_of(mesh, STEPS)
    rows = []
    for number in range(3):
        recorder = StepRecorder(mesh)
        step(loader.micro_batches(number), 1e-3, recorder)
        recorder.end()
        spans = recorder.spans()
        in_optimizer = [
            what
            for _, what, start, end in spans.waits
            for name, first, last in spans.phases
            if name == "optimizer" and first <= start and end <= last
        ]
        rows.append(
            {
                "shares": shares_of(spans),
                "step": spans.end - spans.start,
                "in optimizer": in_optimizer,
                "carried": sum(call.began_before for call in recorder.calls),
                "counted": recorder.traffic(0)["dp"][0],
            }
        )
    return rows


def test_what_is_waited_for_in_the_next_step_is_told_there_and_sent_once() -> None:
    for rows in run_layout(Layout(dp=2), _shares):
        assert [row["carried"] for row in rows] == [0, 1, 1]
        assert [row["counted"] for row in rows] == [4, 4, 4]
        for row in rows:
            assert not row["in optimizer"]
            assert sum(row["shares"].values()) == pytest.approx(row["step"])

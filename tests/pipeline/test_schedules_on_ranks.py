"""Every schedule in real processes: losses and gradients of the plain model, whatever the transport; nothing is left behind."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallax.collectives import all_reduce_
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.pipeline import ALL_SCHEDULES, ActivationSpec, PipelineExecutor, Schedule, make_schedule, simulate
from parallax.pipeline.transport import GroupTransport
from parallax.tensor_parallel.weight_gradients import WeightQueue, attach_queue
from tests.distributed.harness import run_layout
from tests.pipeline.toy import (
    HIDDEN,
    ROWS,
    gradients_of,
    make_batch,
    make_layers,
    make_stages,
    plain_losses_and_gradients,
)

SPEC = ActivationSpec((ROWS, HIDDEN), torch.float64)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 12)  # micro-batches


def tables(ranks: int) -> list[Schedule]:
    found = []
    for name in ALL_SCHEDULES:
        for count in COUNTS:
            with suppress(ConfigError):  # sizes that the schedule has no table for
                found.append(make_schedule(name, ranks, count))
    return found


def executor_of(mesh: Mesh, schedule: Schedule, **how: object) -> tuple[PipelineExecutor, list]:
    """Return this rank's executor, over parallel layers of its own, and these."""
    layers, weights = make_layers(schedule.num_stages, parallel=True), WeightQueue()
    stages = make_stages(layers, make_batch(schedule.num_micro_batches))
    mine = schedule.stages_of(mesh.pp_rank)
    for index in mine:
        attach_queue(layers[index], weights)
    executor = PipelineExecutor(schedule, mesh.pp, {index: stages[index] for index in mine}, weights=weights, **how)
    return executor, [layers[index] for index in mine]


def check(mesh: Mesh, schedule: Schedule, **how: object) -> None:
    executor, layers = executor_of(mesh, schedule, **how)
    count, mine = schedule.num_micro_batches, schedule.stages_of(mesh.pp_rank)
    losses, gradients = plain_losses_and_gradients(schedule.num_stages, count)
    outputs = executor.run()
    total = all_reduce_(torch.stack([*outputs, torch.zeros((), dtype=torch.float64)]).sum(), mesh.pp)
    assert total.item() == pytest.approx(sum(losses), rel=1e-12), schedule
    summed = gradients_of(layers)
    for stage in range(schedule.num_stages):  # every rank takes part in the sum over those who hold the stage twice
        if len(schedule.holders[stage]) > 1:
            for place in range(2):
                has = stage in mine
                index = 2 * mine.index(stage) + place if has else 0
                local = summed[index] if has else torch.zeros_like(gradients[2 * stage + place])
                total = all_reduce_(local.clone(), mesh.pp)
                if has:
                    summed[index] = total
    expected = [gradients[2 * stage + place] for stage in mine for place in range(2)]
    for got, right in zip(summed, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)
    assert executor.peak_in_flight == simulate(schedule).peak_in_flight[mesh.pp_rank], schedule


def check_all(mesh: Mesh) -> int:
    second = replace(mesh.pp, backward_process_group=dist.new_group())
    for schedule in tables(mesh.layout.pp):
        check(mesh, schedule)  # shapes are found out
        check(mesh, schedule, spec=SPEC)
        for spec in (None, SPEC):  # as between hosts: through sockets
            check(mesh, schedule, transport=GroupTransport(mesh.pp, mesh.device, spec))
        # As on NCCL: no tags, so messages must pair up by their order alone.
        check(mesh, schedule, transport=GroupTransport(second, mesh.device, SPEC, tagged=False))
    return len(tables(mesh.layout.pp))


@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_and_number_of_micro_batches_equals_the_plain_model(pp: int) -> None:
    assert run_layout(Layout(pp=pp), check_all, timeout=200)[0] > 30


def count_tensors(mesh: Mesh) -> dict[str, list[int]]:
    counts = {}
    for name in ALL_SCHEDULES:
        executor, _ = executor_of(mesh, make_schedule(name, mesh.layout.pp, 8), spec=SPEC)
        counts[name] = []
        for _ in range(4):
            executor.run()
            gc.collect()
            counts[name].append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        del executor
    return counts


def test_no_schedule_keeps_more_from_step_to_step() -> None:
    for rank, counts in enumerate(run_layout(Layout(pp=2), count_tensors)):
        for name, found in counts.items():
            assert max(found[2:]) <= max(found[:2]), (rank, name, found)  # a send may leave a moment later


def die_in_a_step(mesh: Mesh, name: str, folder: str) -> None:
    """Let rank 1 end in the middle of its second step; write down what the others say."""
    import os

    executor, _ = executor_of(mesh, make_schedule(name, mesh.layout.pp, 8), spec=SPEC)
    executor.run()
    if mesh.pp_rank == 1:
        walk = executor.walk()
        for _ in range(len(executor.program.steps[1]) // 2):
            next(walk)
        os._exit(1)
    try:
        executor.run()
    except RuntimeError as error:
        Path(folder, f"rank{mesh.pp_rank}").write_text(str(error))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe"])
def test_a_killed_rank_makes_the_others_name_the_action_they_were_in(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_layout(Layout(pp=2), die_in_a_step, name, str(tmp_path), timeout=60)
    said = (tmp_path / "rank0").read_text()
    assert said.startswith("rank 0 (pipeline rank 0): while ") and "pipeline rank 1" in said, said

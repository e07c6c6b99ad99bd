"""Real processes over gloo: every layout equals the plain model, and a lost rank is named by the others."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallax.collectives import barrier
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.pipeline import SCHEDULES, ActivationSpec, PipelineExecutor, forward_only, simulate
from parallax.pipeline.transport import GroupTransport
from tests.distributed.harness import run_layout
from tests.pipeline.toy import (
    HIDDEN,
    ROWS,
    Listener,
    gradients_of,
    make_batch,
    make_layers,
    make_stages,
    plain_losses_and_gradients,
)

SPEC = ActivationSpec((ROWS, HIDDEN), torch.float64)


def check_case(mesh: Mesh, name: str, micro_batches: int, **how: Any) -> None:
    """Train one step and evaluate once; everything this rank holds must equal the plain model."""
    pp = mesh.layout.pp
    layers = make_layers(pp)
    stage = make_stages(layers, make_batch(micro_batches))[mesh.pp_rank]
    schedule = SCHEDULES[name](pp, micro_batches)
    executor = PipelineExecutor(schedule, mesh.pp, {mesh.pp_rank: stage}, **how)
    listener = Listener()
    losses, gradients = plain_losses_and_gradients(pp, micro_batches)
    outputs = executor.run(listener=listener)
    assert [stage for what, stage in listener.told if what == "last"] == [mesh.pp_rank]
    assert [what for what, _ in listener.told if what != "last"] == ["before", "after"] * micro_batches
    assert executor.peak_in_flight == simulate(schedule).peak_in_flight[mesh.pp_rank]
    right = gradients[2 * mesh.pp_rank : 2 * mesh.pp_rank + 2]
    for mine, expected in zip(gradients_of(layers), right, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        evaluated = executor.run(executor.prepare(forward_only(pp, micro_batches)))
    is_last = mesh.pp_rank == pp - 1
    for values in (outputs, evaluated):
        assert [value.item() for value in values] == (pytest.approx(losses, rel=1e-12) if is_last else [])


def check_cases(mesh: Mesh) -> None:
    """Go through the table in one world: shapes found out, shapes given, and messages without tags as on NCCL."""
    second = replace(mesh.pp, backward_process_group=dist.new_group())
    for name in ("gpipe", "1f1b", "1f1b-eager"):  # one whole stage a rank; the others are trained with elsewhere
        for micro_batches in (1, 3, 8):
            check_case(mesh, name, micro_batches)
            check_case(mesh, name, micro_batches, spec=SPEC)
            for spec in (None, SPEC):
                tagged = GroupTransport(mesh.pp, mesh.device, spec)
                check_case(mesh, name, micro_batches, transport=tagged)
            for spec in (None, SPEC) if mesh.layout.dp == 1 else ():
                untagged = GroupTransport(second, mesh.device, spec, tagged=False)
                check_case(mesh, name, micro_batches, transport=untagged)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(pp=2, dp=2)], ids=str)
def test_losses_and_gradients_of_real_ranks_equal_the_single_process(layout: Layout) -> None:
    run_layout(layout, check_cases)


def check_after_a_broken_step(mesh: Mesh, begun: tuple[int, int]) -> None:
    """Break a step off, on each rank after as many parts as `begun` says, and do another one on other numbers."""
    layers, rank = make_layers(2), mesh.pp_rank
    stage = make_stages(layers, make_batch(4))[rank]
    broken_off = True

    def function(tensor: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
        output = stage(tensor, micro_batch)
        return 3 * output if broken_off else output

    executor = PipelineExecutor(SCHEDULES["gpipe"](2, 4), mesh.pp, {rank: function}, SPEC)
    walk = executor.walk()
    for _ in range(begun[rank]):
        next(walk)
    walk.close()
    barrier(mesh.world)
    broken_off = False
    for layer in layers:
        layer.zero_grad()
    losses, gradients = plain_losses_and_gradients(2, 4)
    outputs = executor.run()
    assert [output.item() for output in outputs] == (pytest.approx(losses, rel=1e-12) if rank == 1 else [])
    for mine, right in zip(gradients_of(layers), gradients[2 * rank : 2 * rank + 2], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("begun", [(0, 0), (7, 0), (7, 4)], ids=str)  # few enough that no rank waits for the other
def test_a_step_that_was_broken_off_leaves_nothing_to_the_next(begun: tuple[int, int]) -> None:
    run_layout(Layout(pp=2), check_after_a_broken_step, begun)


def check_evaluation_first(mesh: Mesh) -> None:
    layers = make_layers(2)
    stages = make_stages(layers, make_batch(4))
    executor = PipelineExecutor(SCHEDULES["1f1b"](2, 4), mesh.pp, {mesh.pp_rank: stages[mesh.pp_rank]}, SPEC)
    losses, _ = plain_losses_and_gradients(2, 4)
    with torch.inference_mode():
        evaluated = executor.run(executor.prepare(forward_only(2, 4)))
    for outputs in (evaluated, executor.run()):
        assert [output.item() for output in outputs] == (pytest.approx(losses, rel=1e-12) if mesh.pp_rank else [])


def test_inference_mode_before_the_first_step_does_no_harm() -> None:
    run_layout(Layout(pp=2), check_evaluation_first)


def count_tensors(mesh: Mesh) -> list[int]:
    """Return the number of tensors alive after each of some steps."""
    layers = make_layers(mesh.layout.pp)
    stage = make_stages(layers, make_batch(6))[mesh.pp_rank]
    executor = PipelineExecutor(SCHEDULES["1f1b"](mesh.layout.pp, 6), mesh.pp, {mesh.pp_rank: stage})
    counts = []
    for _ in range(5):
        executor.run()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    return counts


def integers_and_views(mesh: Mesh) -> tuple[list[float], list[float]]:
    """Hand on integers from stage 0 and a transposed view from stage 1; return losses and the weight's gradient."""
    weight = torch.arange(1.0, 7.0).view(2, 3).requires_grad_()
    stages = {
        0: lambda tensor, number: torch.tensor([[number + 1, 2, 3], [4, 5, 6]]),
        1: lambda tensor, number: (tensor * weight).t(),
        2: lambda tensor, number: (tensor * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).sum(),
    }
    executor = PipelineExecutor(SCHEDULES["1f1b"](3, 2), mesh.pp, {mesh.pp_rank: stages[mesh.pp_rank]})
    losses = executor.run()
    losses = executor.run()  # the second step knows the shapes and posts receives early
    return [loss.item() for loss in losses], [] if weight.grad is None else weight.grad.flatten().tolist()


def changed_shape(mesh: Mesh) -> str:
    """Return what rank 0 says when a later micro-batch has another shape."""
    stages = {
        0: lambda tensor, number: torch.zeros(number + 1, 2, requires_grad=True),
        1: lambda tensor, number: tensor.sum(),
        2: lambda tensor, number: tensor.sum(),
    }
    if mesh.pp_rank > 0:
        return ""
    executor = PipelineExecutor(SCHEDULES["gpipe"](3, 2), mesh.pp, {0: stages[0]})
    with pytest.raises(ConfigError) as caught:
        executor.run()
    return str(caught.value)


def three_ranks(mesh: Mesh) -> tuple:
    """Several checks in one world; the last leaves messages behind."""
    return count_tensors(mesh), integers_and_views(mesh), changed_shape(mesh)


def test_three_ranks_keep_nothing_pass_integers_and_views_and_refuse_a_changed_shape() -> None:
    counts, values, said = zip(*run_layout(Layout(pp=3), three_ranks), strict=True)
    for row in counts:
        assert row[2:] == [row[2]] * 3
    factors = torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]])
    weight = torch.arange(1.0, 7.0).view(2, 3)
    inputs = [torch.tensor([[number + 1.0, 2, 3], [4, 5, 6]]) for number in range(2)]
    assert values[2][0] == [float((factors * weight * tensor).sum()) for tensor in inputs]
    assert values[1][1] == (2 * sum(factors * tensor for tensor in inputs)).flatten().tolist()
    assert "the result of 0F1 is [2, 2] torch.float32, but the pipeline passes on [1, 2]" in said[0]


def die_in_the_second_step(mesh: Mesh, folder: str) -> None:
    """Rank 1 ends without a word in its forward of micro-batch 2; the others write down what they were told."""
    layers, batch = make_layers(3), make_batch(4)
    stage = make_stages(layers, batch)[mesh.pp_rank]
    steps = 0

    def dying(tensor: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
        if mesh.pp_rank == 1 and steps == 1 and micro_batch == 2:
            os._exit(1)
        return stage(tensor, micro_batch)

    executor = PipelineExecutor(SCHEDULES["1f1b"](3, 4), mesh.pp, {mesh.pp_rank: dying}, SPEC)
    try:
        executor.run()
        steps = 1
        executor.run()
    except RuntimeError as error:
        Path(folder, f"rank{mesh.pp_rank}").write_text(str(error))
    os._exit(0)  # no leave-taking: the group is broken


def test_a_rank_that_dies_in_a_step_makes_the_others_say_in_which_action_they_were(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_layout(Layout(pp=3), die_in_the_second_step, str(tmp_path))
    for rank in (0, 2):
        said = (tmp_path / f"rank{rank}").read_text()
        assert said.startswith(f"rank {rank} (pipeline rank {rank}): while "), said
        assert "pipeline rank 1: " in said and (f" of {rank}F" in said or f" of {rank}B" in said), said

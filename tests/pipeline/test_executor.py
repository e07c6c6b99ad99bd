"""The executor with all ranks in one process: results, what it keeps, and what it refuses."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from parallax.errors import ConfigError
from parallax.mesh import Group
from parallax.pipeline import SCHEDULES, Action, PipelineExecutor, Schedule, forward_only, simulate
from parallax.pipeline.schedules import ALL_SCHEDULES, make_schedule
from parallax.tensor_parallel.weight_gradients import attach_queue
from tests.pipeline.in_process import Mailbox, executors_in_process, run_in_process
from tests.pipeline.toy import Listener, gradients_of, make_batch, make_layers, make_stages, plain_losses_and_gradients

CASES = [(1, 1), (1, 4), (2, 3), (2, 4), (4, 1), (4, 8), (4, 12), (5, 3), (6, 12)]


def tables(stages: int, micro_batches: int) -> list[Schedule]:
    """Return every schedule that has a table of these sizes."""
    found = []
    for name in ALL_SCHEDULES:
        with suppress(ConfigError):
            found.append(make_schedule(name, stages, micro_batches))
    return found


@pytest.mark.parametrize(
    "schedule",
    [table for sizes in CASES for table in tables(*sizes)],
    ids=lambda s: f"{s.name}-{s.num_ranks}-{s.num_micro_batches}",
)
@pytest.mark.parametrize("parallel", [False, True], ids=["torch-layers", "parallel-layers"])
def test_losses_gradients_and_peak_equal_the_plain_model_and_the_simulator(schedule: Schedule, parallel: bool) -> None:
    stages, micro_batches = schedule.num_stages, schedule.num_micro_batches
    layers, batch = make_layers(stages, parallel), make_batch(micro_batches)
    executors = executors_in_process(schedule, make_stages(layers, batch))
    for (
        executor
    ) in executors:  # a stage that two ranks hold is one module here: whichever rank works on it has its queue
        executor.weights = executors[0].weights
    for layer in layers:
        attach_queue(layer, executors[0].weights)
    outputs, stuck = run_in_process(executors)
    losses, gradients = plain_losses_and_gradients(stages, micro_batches)
    assert not stuck
    assert sorted(loss.item() for row in outputs for loss in row) == pytest.approx(sorted(losses), rel=1e-12)
    assert not any(loss.requires_grad for row in outputs for loss in row)
    for mine, right in zip(gradients_of(layers), gradients, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)
    assert tuple(executor.peak_in_flight for executor in executors) == simulate(schedule).peak_in_flight


class Storages:
    """How many storages of a rank's saved activations are alive, and were at most."""

    def __init__(self) -> None:
        self.alive = self.most = 0

    def make(self) -> torch.Tensor:
        array = numpy.zeros(1)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(array, self._let_go)
        return torch.from_numpy(array)

    def _let_go(self) -> None:
        self.alive -= 1


class SavesOne(torch.autograd.Function):
    """The identity, with a tensor saved for backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, storages: Storages) -> torch.Tensor:
        ctx.save_for_backward(storages.make())
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * (1 + ctx.saved_tensors[0]), None


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_as_many_activations_are_alive_on_each_rank_as_the_simulator_says(sizes: tuple[int, int]) -> None:
    for schedule in tables(*sizes):
        layers, batch = make_layers(schedule.num_stages), make_batch(schedule.num_micro_batches)
        executors = executors_in_process(schedule, make_stages(layers, batch))
        of_ranks = [Storages() for _ in executors]
        for executor, storages in zip(executors, of_ranks, strict=True):
            executor.stages = {
                index: lambda tensor, number, stage=stage, storages=storages: SavesOne.apply(
                    stage(tensor, number), storages
                )
                for index, stage in executor.stages.items()
            }
        for _ in range(2):
            _, stuck = run_in_process(executors)
            assert not stuck
            assert tuple(storages.most for storages in of_ranks) == simulate(schedule).peak_in_flight, schedule
            assert not any(storages.alive for storages in of_ranks)


def test_a_rank_with_two_stages_hands_over_to_itself_and_may_feed_micro_batches_from_both_ends() -> None:
    rows = [
        ["0F0", "0F1", "b1F2", "b1B2", "0B0", "0B1"],
        ["b0F2", "1F0", "1B0", "1F1", "1B1", "b0B2"],
    ]
    order = tuple(tuple(map(Action.parse, row)) for row in rows)
    both_ways = Schedule("both-ways", 2, 2, 3, order, ((0, 1), (1, 0)))
    passes = (("F", 0), ("F", 1), ("B", 1), ("B", 0))
    one_rank = Schedule("one", 2, 1, 3, (tuple(Action(k, s, m) for m in range(3) for k, s in passes),), ((0, 0),))
    for schedule in (both_ways, one_rank):
        layers = make_layers(2)
        executors = executors_in_process(schedule, make_stages(layers, make_batch(3)))
        outputs, stuck = run_in_process(executors)
        losses, gradients = plain_losses_and_gradients(2, 3)
        assert not stuck
        assert sorted(loss.item() for row in outputs for loss in row) == pytest.approx(sorted(losses), rel=1e-12)
        for mine, right in zip(gradients_of(layers), gradients, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)


def test_evaluation_keeps_nothing_and_returns_outputs_in_order() -> None:
    layers, batch = make_layers(3), make_batch(4)
    executors = executors_in_process(SCHEDULES["1f1b"](3, 4), make_stages(layers, batch))
    program = executors[0].prepare(forward_only(3, 4))
    with torch.no_grad():
        outputs, _ = run_in_process(executors, program)
    losses, _ = plain_losses_and_gradients(3, 4)
    assert [loss.item() for loss in outputs[-1]] == pytest.approx(losses, rel=1e-12)
    assert [executor.peak_in_flight for executor in executors] == [1, 1, 1]
    assert gradients_of(layers) == []


def test_before_the_last_backward_of_a_stage_the_caller_is_told_once() -> None:
    layers = make_layers(1)
    seen = []
    executor = PipelineExecutor(SCHEDULES["1f1b"](1, 3), None, make_stages(layers, make_batch(3)))

    class Told(Listener):
        def expect_last_backward(self, stage: int) -> None:
            seen.append((stage, layers[0][0].weight.grad.clone()))

    executor.run(listener=Told())
    assert [stage for stage, _ in seen] == [0]
    partial = make_layers(1)
    stages = make_stages(partial, make_batch(3))
    for number in range(2):
        stages[0](None, number).backward()
    torch.testing.assert_close(seen[0][1], partial[0][0].weight.grad)


def test_the_caller_is_told_around_what_completes_a_chunks_gradients_which_is_w_where_there_is_one() -> None:
    actions = [Action(kind, 0, number) for kind, number in (("F", 0), ("F", 1), ("I", 0), ("I", 1), ("W", 0), ("W", 1))]
    schedule = Schedule("split", 1, 1, 2, (tuple(actions),), ((0,),))
    listener = Listener()
    executor = PipelineExecutor(schedule, None, make_stages(make_layers(1), make_batch(2)))
    walk = executor.walk(listener=listener)
    told = []
    for _ in walk:
        told.append([what for what, _ in listener.told])
        listener.told.clear()
    told.append([what for what, _ in listener.told])
    assert told == [[], [], [], [], ["last"], ["before", "after"], ["before", "after"]]


class _Watched(torch.autograd.Function):
    """Adds a parameter into memory whose end can be seen."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, weight: torch.Tensor, alive: list) -> torch.Tensor:
        memory = numpy.asarray((tensor + weight).numpy().copy())
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, gradient.sum(0), None


def test_an_output_is_gone_once_it_is_sent() -> None:
    alive: list[weakref.ref] = []
    weight = nn.Parameter(torch.ones(4))
    most = []

    def first(tensor: None, micro_batch: int) -> torch.Tensor:
        most.append(sum(ref() is not None for ref in alive))
        return _Watched.apply(torch.ones(2, 4), weight, alive)

    stages: dict[int, Callable] = {0: first, 1: lambda tensor, micro_batch: tensor.sum()}
    executors = executors_in_process(SCHEDULES["gpipe"](2, 5), stages)
    run_in_process(executors)
    assert len(alive) == 5 and max(most) == 0
    assert torch.equal(weight.grad, torch.full((4,), 10.0))


def test_a_loss_that_trains_nothing_and_a_step_without_gradients_are_refused() -> None:
    weight = torch.ones(2, requires_grad=True)
    stages = {0: lambda tensor, number: (weight * 2).sum().detach()}
    executor = PipelineExecutor(SCHEDULES["1f1b"](1, 2), None, stages)
    with pytest.raises(ConfigError, match="the loss of micro-batch 0 does not depend on anything that is trained"):
        executor.run()
    with torch.no_grad(), pytest.raises(ConfigError, match="1f1b has backwards, and gradients are turned off"):
        executor.run()


def test_no_gradient_is_sent_for_integers_and_none_is_needed_from_a_frozen_stage() -> None:
    table = nn.Embedding(10, 4)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    weight = nn.Parameter(torch.ones(4))
    stages: dict[int, Callable] = {
        0: lambda tensor, number: torch.arange(6).view(2, 3) + number,
        1: lambda tensor, number: frozen(table(tensor).detach()),
        2: lambda tensor, number: (tensor * weight).sum(),
    }
    executors = executors_in_process(SCHEDULES["1f1b"](3, 2), stages)
    _, stuck = run_in_process(executors)
    mailbox = executors[0]._transport
    assert not stuck and isinstance(mailbox, Mailbox)
    assert sorted(mailbox.log) == ["0F0", "0F1", "1F0", "1F1", "2B0", "2B1"]
    assert weight.grad is not None and table.weight.grad is None


def test_steps_do_not_leave_tensors_behind() -> None:
    layers = make_layers(3)
    executors = executors_in_process(SCHEDULES["1f1b"](3, 4), make_stages(layers, make_batch(4)))
    counts = []
    for _ in range(4):
        run_in_process(executors)
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert counts[1:] == [counts[1]] * 3


def test_what_does_not_fit_is_said() -> None:
    schedule = SCHEDULES["1f1b"](2, 2)
    stage = {0: lambda tensor, number: torch.zeros(3, requires_grad=True)}
    with pytest.raises(ConfigError, match="is for 2 ranks and the pipeline has 1"):
        PipelineExecutor(schedule, None, stage)
    with pytest.raises(ConfigError, match=r"rank 1 holds the stages \[1\] .* was given functions for \[0\]"):
        PipelineExecutor(schedule, Group("pp", (0, 1), 1), stage, transport=Mailbox())
    with pytest.raises(ConfigError, match=r"must return the scalar loss .* not a tensor of shape \[3\]"):
        PipelineExecutor(SCHEDULES["1f1b"](1, 1), None, stage).run()
    with pytest.raises(ConfigError, match="stage 0 must return one tensor, not tuple"):
        PipelineExecutor(SCHEDULES["1f1b"](1, 1), None, {0: lambda tensor, number: (tensor, tensor)}).run()

"""One training step, the same code for every layout.

    count the targets of the whole step         one AllReduce over dp
    zero the main gradients
    run the pipeline schedule                   each micro-batch's summed loss divided by that count
    finish the gradient reduction               most of it ran during the last backward
    gradient norm and loss                      one AllReduce over the world, with what ranks were asked (to stop)
    judge, clip, update                         an update that would spoil the weights is skipped, on the device

A single process runs the same schedule with one stage: gradient accumulation is a pipeline of length one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from parallax.collectives import all_reduce_
from parallax.data_parallel.bucket import GradientBuckets, NamedParameter
from parallax.data_parallel.norm import clip_coefficient, local_squared_norm
from parallax.data_parallel.optimizer import ShardedOptimizer
from parallax.mesh import Mesh
from parallax.models.decoder import DecoderStage
from parallax.models.packed_rows import PackedRows
from parallax.pipeline.actions import Schedule
from parallax.pipeline.chunks import BackwardListener
from parallax.pipeline.executor import PipelineExecutor
from parallax.pipeline.lower import Program
from parallax.pipeline.transport import ActivationSpec
from parallax.tensor_parallel.precision import Fp8State
from parallax.tensor_parallel.segments import Segment, merged
from parallax.tensor_parallel.weight_gradients import WeightQueue, attach_queue
from parallax.training.faults import Judge
from parallax.training.flops import Work, work_of
from parallax.training.record import StepRecorder

Batch = Mapping[str, torch.Tensor]


class Objective(Protocol):
    """What a loss is; see parallax.objectives."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return the number of targets in `batch`."""

    def loss(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of the losses, weight)."""


@dataclass(frozen=True)
class StepResult:
    """Numbers on the device, float64, so that a step that is not logged does not wait for them.

    loss: the optimised loss, summed over the step and divided by its weight. weight: the targets of the step, each counting what
    the objective says. verdict: a `faults.Verdict`. asked: the sum over all ranks of what `asked()` returned. work: `[3]`, see
    `Work`. infinite_amaxes: of FP8's delayed scaling, see `Scales.agree`. local: what this rank alone brought to them.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    weight: torch.Tensor
    verdict: torch.Tensor
    asked: torch.Tensor
    work: torch.Tensor
    infinite_amaxes: torch.Tensor
    local: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """Return loss, gradient norm, weight, verdict, asked, infinite amaxes and the three of work as one tensor."""
        first = [self.loss, self.grad_norm, self.weight, self.verdict, self.asked, self.infinite_amaxes]
        return torch.cat([torch.stack(first), self.work])


class MicroBatch(NamedTuple):
    """One micro-batch on the device, and what its rows hold."""

    tensors: Batch
    rows: PackedRows | None
    work: Work


@dataclass(frozen=True, eq=False)
class _StageFunction:
    """One stage as the pipeline sees it: the first finds its tokens by the micro-batch, the last gives the loss."""

    runner: StageRunner
    stage: DecoderStage
    is_first: bool
    is_last: bool

    def __call__(self, hidden: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
        batch, rows, _ = self.runner.batches[micro_batch]
        output = self.stage(batch["input_ids"] if self.is_first else hidden, rows)
        return self._loss(output, batch) if self.is_last else output

    def segments(self, micro_batch: int) -> list[Segment]:
        batch, rows, _ = self.runner.batches[micro_batch]
        segments = self.stage.segments(batch["input_ids"], rows)
        if self.is_last:
            segments.append(Segment(lambda logits: (self._loss(logits, batch),)))
        return merged(segments)

    def _loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss_sum, _ = self.runner.objective.loss(logits, batch)
        return loss_sum / self.runner.weight


class StageRunner:
    """Feeds the micro-batches of a step to this rank's stages, inside a pipeline schedule.

    spec: what stages hand on. `training` and `evaluating` are the programs of the schedule and of its forwards alone.
    """

    def __init__(
        self,
        stages: Mapping[int, DecoderStage],
        objective: Objective,
        schedule: Schedule,
        spec: ActivationSpec,
        mesh: Mesh,
    ) -> None:
        self.stages, self.objective, self.spec, self.mesh = dict(stages), objective, spec, mesh
        weights = WeightQueue()
        for stage in stages.values():
            attach_queue(stage, weights)
        last = schedule.num_stages - 1
        functions = {
            index: _StageFunction(self, stage, index == 0, index == last) for index, stage in self.stages.items()
        }
        self.executor = PipelineExecutor(
            schedule, mesh.pp, functions, spec, mesh.device, weights=weights, journal=mesh.journal
        )
        self.training = self.executor.program
        self.evaluating = self.executor.prepare(schedule.forwards())
        self.batches: Sequence[MicroBatch] = ()  # of the step that is under way
        self.weight = torch.ones(())

    def on_device(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        """Return the micro-batches on this rank's device."""
        device, result = self.mesh.device, []
        for batch in batches:
            rows = PackedRows.from_batch(batch)  # from what is on the host: nothing waits for a GPU
            tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            work = work_of(batch["labels"], () if rows is None else rows.lengths)
            result.append(MicroBatch(tensors, None if rows is None else rows.to(device), work))
        return result

    def count(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weight, work `[3]`) of the step over all micro-batches and data-parallel ranks, float64."""
        weights = torch.stack([self.objective.weight(batch.tensors) for batch in batches])
        work = torch.tensor([batch.work for batch in batches], dtype=torch.float64).sum(0)
        mine = torch.cat([weights.sum().double().view(1), work.to(self.mesh.device, non_blocking=True)])
        total = all_reduce_(mine, self.mesh.dp)
        return total[0], total[1:]

    def run(
        self,
        program: Program,
        batches: Sequence[MicroBatch],
        weight: torch.Tensor,
        listener: BackwardListener | None = None,
        recorder: StepRecorder | None = None,
    ) -> torch.Tensor:
        """Run a program; return this rank's contribution to the loss, float64, counted once over the world.

        weight: what each micro-batch's summed loss is divided by.
        """
        self.batches, self.weight = batches, weight
        losses = self.executor.run(program, listener, recorder)
        self.batches = ()
        # Every tp rank of the last stage computes the same loss.
        if not losses or self.mesh.tp_rank != 0:
            return torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return torch.stack(losses).double().sum()


@dataclass(eq=False)
class TrainStep:
    """Everything that one step needs; call it with the rank's micro-batches and the learning rate."""

    runner: StageRunner
    parameters: list[NamedParameter]
    buckets: GradientBuckets
    optimizer: ShardedOptimizer
    mesh: Mesh
    clip_grad: float  # limit of the global gradient norm; 0: no clipping
    judge: Judge
    fp8: Fp8State | None = None

    def __call__(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        recorder: StepRecorder | None = None,
        asked: Callable[[], float] = lambda: 0.0,
    ) -> StepResult:
        """Train on the rank's micro-batches. asked: a number of this rank's, to be summed over all ranks."""
        phase: Callable[[str], AbstractContextManager] = _unrecorded if recorder is None else recorder.phase
        with phase("data"):
            loaded = self.runner.on_device(batches)
        weight, work = self.runner.count(loaded)
        self.buckets.zero_grad()
        if self.fp8 is not None:
            self.fp8.begin_step()
        loss = self.runner.run(
            self.runner.training,
            loaded,
            torch.where(weight > 0, weight, 1.0).float(),  # without a target the summed loss is 0 already
            listener=self.buckets,
            recorder=recorder,
        )
        with phase("reduction"):
            self.buckets.finish()
        infinite = None if self.fp8 is None else self.fp8.agree()
        infinite = torch.zeros_like(loss) if infinite is None else infinite
        local = torch.stack([local_squared_norm(self.buckets), loss, torch.full_like(loss, asked()), infinite])
        squared_norm, loss, total_asked, infinite = all_reduce_(local.clone(), self.mesh.world)
        grad_norm = squared_norm.sqrt()
        verdict = self.judge(loss, grad_norm, weight)
        skip = (verdict != 0).float()
        if self.fp8 is not None:
            self.fp8.finish_step(skip)
        with phase("optimizer"):
            self.optimizer.step(learning_rate, clip_coefficient(grad_norm, self.clip_grad), skip)
        return StepResult(loss, grad_norm, weight, verdict, total_asked, work, infinite, local)


def _unrecorded(name: str) -> AbstractContextManager:
    return nullcontext()


@torch.no_grad()
def evaluate(
    runner: StageRunner, steps: Iterable[Sequence[Batch]], give_up: Callable[[], bool] = lambda: False
) -> float | None:
    """Return the mean loss over the targets of all `steps`, each a list of this rank's micro-batches.

    give_up: asked after each step, the same on all ranks; None is returned as soon as it says yes, or if there is no target.
    """
    total = torch.zeros(2, dtype=torch.float64, device=runner.mesh.device)
    one = torch.ones((), device=runner.mesh.device)
    for batches in steps:
        loaded = runner.on_device(batches)
        weight, _ = runner.count(loaded)
        total[0] += runner.run(runner.evaluating, loaded, one)
        total[1] += weight if runner.mesh.rank == 0 else 0
        if give_up():
            return None
    loss_sum, weight_sum = all_reduce_(total, runner.mesh.world).tolist()
    return loss_sum / weight_sum if weight_sum else None

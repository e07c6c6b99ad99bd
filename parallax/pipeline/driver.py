"""A pipeline for models and training loops of your own: a schedule, your stages, and a step.

    with connect(Layout(pp=4)) as mesh:
        pipe = DualPipe(stages, mesh, num_micro_batches=8)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for inputs, labels in batches:
            loss = pipe.step(inputs, labels, criterion)
            optimizer.step()
            optimizer.zero_grad()

A stage is any module from one tensor to one tensor. What a schedule holds twice, what several stages share, and what dp replicas
hold, starts equal and gets the same gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from parallax.collectives import all_reduce_start, broadcast_, gather_json
from parallax.errors import ConfigError
from parallax.mesh import Group, Mesh, Replicas
from parallax.pipeline.actions import Schedule
from parallax.pipeline.executor import PipelineExecutor
from parallax.pipeline.schedules import make_schedule
from parallax.pipeline.tables import to_csv
from parallax.pipeline.transport import ActivationSpec
from parallax.tensor_parallel.weight_gradients import WeightQueue, attach_queue

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Pipeline:
    """Drives a model that is given as a list of stages.

    schedule: a name, such as "1f1b" or "zb-v", or a table. The number of stages follows from it: `num_stages`.
    stages: the modules of all stages, or, where no rank should hold them all, those of this rank by number. Those of this
        rank, `self.stages`, are used, on the mesh's device. Parameters that several stages share (a tied embedding) take all
        stages to be given, since other ranks may have the others.
    spec: shape and type of what stages hand on; None: the first step finds out.

    Made by all ranks together. Raises ConfigError if the schedule has no table for these sizes, or is another's, or differs from
    another rank's, or a stage is missing.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        mesh: Mesh,
        schedule: str | Schedule,
        num_micro_batches: int,
        *,
        num_chunks: int | None = None,
        spec: ActivationSpec | None = None,
    ) -> None:
        if isinstance(schedule, str):
            schedule = make_schedule(schedule, mesh.layout.pp, num_micro_batches, num_chunks)
        if schedule.forward_only or schedule.num_micro_batches != num_micro_batches:
            raise ConfigError(
                f"schedule {schedule.name} is for {schedule.num_micro_batches} micro-batches"
                f"{' without backwards' if schedule.forward_only else ''}; a table with backwards for {num_micro_batches} is needed"
            )
        given = dict(stages) if isinstance(stages, Mapping) else dict(enumerate(stages))
        if not isinstance(stages, Mapping) and len(given) != schedule.num_stages:
            raise ConfigError(
                f"{len(given)} stages are given, and schedule {schedule.name} has {schedule.num_stages} on "
                f"{schedule.num_ranks} ranks; cut the model into {schedule.num_stages}"
            )
        missing = [stage for stage in schedule.stages_of(mesh.pp_rank) if stage not in given]
        if missing:
            raise ConfigError(
                f"pipeline rank {mesh.pp_rank} holds the stages {list(schedule.stages_of(mesh.pp_rank))} in schedule "
                f"{schedule.name}, but stage {missing[0]} is not given"
            )
        self.mesh, self.schedule = mesh, schedule
        self._check_alike()
        self.stages = {stage: given[stage].to(mesh.device) for stage in schedule.stages_of(mesh.pp_rank)}
        weights = WeightQueue()
        for module in self.stages.values():
            attach_queue(module, weights)
        self._holders = self._find_holders(given)
        self._make_equal()
        functions = {stage: self._function(stage) for stage in self.stages}
        self.executor = PipelineExecutor(schedule, mesh.pp, functions, spec, mesh.device, weights=weights)
        self._evaluating = self.executor.prepare(schedule.forwards())
        self._inputs: Sequence[torch.Tensor] = ()
        self._labels: Sequence[torch.Tensor] = ()
        self._criterion: Criterion | None = None

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, each once."""
        return iter(dict.fromkeys(parameter for module in self.stages.values() for parameter in module.parameters()))

    def step(
        self, inputs: torch.Tensor | None, labels: torch.Tensor | None, criterion: Criterion
    ) -> torch.Tensor | None:
        """Add the gradients of the mean loss of one batch to the parameters' `grad`.

        inputs, labels: `[batch, ...]`, cut into equal micro-batches along the first dim, the same on all ranks of a pipeline;
            ranks without the first (last) stage may give None. Each dp replica brings its own.
        criterion: (output, labels) of one micro-batch to their mean loss, a scalar.
        Returns the mean of this rank's micro-batches, detached, on ranks with the last stage; None elsewhere.
        Under torch.no_grad(), on all ranks, that is all it does: forwards alone.
        """
        self._inputs, self._labels = self._cut("inputs", inputs, 0), self._cut("labels", labels, self.num_stages - 1)
        self._criterion = criterion
        if torch.is_grad_enabled():
            before = self._take_gradients()
            losses = self.executor.run()
            self._sum_gradients(before)
        else:
            losses = self.executor.run(self._evaluating)
        self._inputs = self._labels = ()
        return torch.stack(losses).mean() * self.schedule.num_micro_batches * self.mesh.layout.dp if losses else None

    def _cut(self, what: str, tensor: torch.Tensor | None, stage: int) -> Sequence[torch.Tensor]:
        count = self.schedule.num_micro_batches
        if tensor is None:
            if stage in self.stages:
                raise ConfigError(
                    f"pipeline rank {self.mesh.pp_rank} holds stage {stage}, so step() needs {what} there"
                )
            return ()
        if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
            raise ConfigError(f"step() takes {what} as a tensor [batch, ...], not {tensor!r}")
        if not len(tensor) or len(tensor) % count:
            raise ConfigError(f"{what} of {len(tensor)} rows cannot be cut into {count} equal micro-batches")
        return tensor.to(self.mesh.device).chunk(count)

    def _function(self, stage: int) -> Callable[[torch.Tensor | None, int], torch.Tensor]:
        module, last = self.stages[stage], self.num_stages - 1

        def call(tensor: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
            output = module(self._inputs[micro_batch] if tensor is None else tensor)
            if stage < last:
                return output
            assert self._criterion is not None
            loss = self._criterion(output, self._labels[micro_batch])
            return loss / (self.schedule.num_micro_batches * self.mesh.layout.dp)

        return call

    def _check_alike(self) -> None:
        """Raise ConfigError, on all ranks, if they have different tables: they would wait for each other's messages in vain."""
        table = hashlib.sha256(to_csv(self.schedule).encode()).hexdigest()
        mine = [self.schedule.name, self.schedule.num_micro_batches, table]
        rows = gather_json(mine, self.mesh.world if self.mesh.connected else None, self.mesh.device)
        for rank, (name, micro_batches, other) in enumerate(rows):
            if other != rows[0][2]:
                raise ConfigError(
                    f"rank 0 makes a pipeline of schedule {rows[0][0]} with {rows[0][1]} micro-batches, and rank {rank} one of "
                    f"{name} with {micro_batches}{', another table' if rows[0][:2] == [name, micro_batches] else ''}; give all "
                    "ranks the same"
                )

    def _find_holders(self, given: Mapping[int, nn.Module]) -> dict[torch.Tensor, Group | None]:
        """Return for each parameter and buffer of this rank who holds it, dp replicas included; in one order on all of them."""
        users: dict[torch.Tensor, list[int]] = {}
        for stage in sorted(given):
            for tensor in _tensors_of(given[stage]):
                users.setdefault(tensor, []).append(stage)
        kinds = {}
        mine = {tensor for module in self.stages.values() for tensor in _tensors_of(module)}
        for tensor in filter(mine.__contains__, users):
            ranks = {rank for stage in users[tensor] for rank in self.schedule.holders[stage]}
            kinds[tensor] = Replicas(stages=tuple(sorted(ranks)) if len(ranks) > 1 else ())
        groups = self.mesh.holders(set(kinds.values()))
        return {tensor: groups[kind] for tensor, kind in kinds.items()}

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Give all holders of a parameter or buffer the value that the first of them has."""
        for tensor, group in self._holders.items():
            broadcast_(tensor, group)

    def _take_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Set aside the gradients of earlier steps, which are sums already, of what has other holders."""
        before = {}
        for parameter, group in self._holders.items():
            if group is not None and parameter.grad is not None:
                before[parameter], parameter.grad = parameter.grad, None
        return before

    @torch.no_grad()
    def _sum_gradients(self, before: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Sum what the holders of a parameter found; all at once, in one order on all of them."""
        pending = []
        for parameter, group in self._holders.items():
            if group is not None and parameter.requires_grad:
                if parameter.grad is None:  # another holder's micro-batches may have given it one
                    parameter.grad = torch.zeros_like(parameter)
                pending.append(all_reduce_start(parameter.grad, group))
        for work in pending:
            work.wait()
        for parameter, gradient in before.items():
            assert parameter.grad is not None
            parameter.grad += gradient


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


class DualPipe(Pipeline):
    """The bidirectional schedule of DeepSeek-V3 (arXiv:2412.19437): as many stages as ranks, each held by two of them."""

    def __init__(
        self, stages: Sequence[nn.Module] | Mapping[int, nn.Module], mesh: Mesh, num_micro_batches: int
    ) -> None:
        super().__init__(stages, mesh, "dualpipe", num_micro_batches)

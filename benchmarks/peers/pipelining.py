"""Pipeline parallelism with torch.distributed.pipelining's schedules, Schedule1F1B also over stages split by DTensor."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.peers.dtensor import clip_split_gradients, split_loss, split_over
from benchmarks.peers.model import make_adamw, make_decoder, mean_loss
from benchmarks.task import Batch, Task
from parallax.mesh import Mesh


class PipelinedLoop:
    """The layers in equal parts, each a stage; with tp above 1 each stage is split by DTensor.

    zbv: two stages a rank in the shape of a V, and ScheduleZBVZeroBubble; otherwise one and Schedule1F1B.
    """

    def __init__(self, mesh: Mesh, task: Task, zbv: bool = False) -> None:
        layout, rank = mesh.layout, mesh.pp_rank
        stages = 2 * layout.pp if zbv else layout.pp
        mine = [rank, stages - 1 - rank] if zbv else [rank]
        self.is_first, self.is_last = 0 in mine, stages - 1 in mine
        self.is_counted, self.clip_grad = self.is_last and mesh.tp_rank == 0, task.optimizer.clip_grad
        devices = init_device_mesh("cpu", (layout.pp, layout.tp), mesh_dim_names=("pp", "tp"))
        self.pp, self.tp = devices.get_group("pp"), devices.get_group("tp") if layout.tp > 1 else None
        self.model = nn.ModuleList([make_decoder(task, stage, stages) for stage in mine])
        if self.tp is not None:
            for part in self.model:
                split_over(part, devices["tp"])
        self.optimizer = make_adamw(self.model, task)
        parts = [
            PipelineStage(part, stage, stages, torch.device("cpu"), group=self.pp)
            for stage, part in zip(mine, self.model, strict=True)
        ]
        loss = mean_loss if self.tp is None else split_loss
        # By default they divide the gradients by the number of micro-batches.
        micro_batches = task.micro_batches_per_rank(mesh)
        self.schedule = (
            ScheduleZBVZeroBubble(parts, micro_batches, loss_fn=loss)
            if zbv
            else Schedule1F1B(parts[0], micro_batches, loss_fn=loss)
        )

    def step(self, batches: list[Batch]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        inputs = [torch.cat([batch["input_ids"] for batch in batches])] if self.is_first else []
        labels = torch.cat([batch["labels"] for batch in batches]) if self.is_last else None
        with nullcontext() if self.tp is None else loss_parallel():
            self.schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
        self._clip()
        self.optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean() if self.is_counted else torch.zeros(())

    def _clip(self) -> None:
        if self.tp is not None:
            clip_split_gradients(self.model, self.clip_grad, self.tp, self.pp)
            return
        parameters = list(self.model.parameters())
        square = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).square()
        dist.all_reduce(square, group=self.pp)
        torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad, square.sqrt())

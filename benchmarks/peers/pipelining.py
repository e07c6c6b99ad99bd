"""Pipeline parallelism with torch.distributed.pipelining's Schedule1F1B, alone or over stages split by DTensor."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.peers.dtensor import clip_split_gradients, split_loss, split_over
from benchmarks.peers.model import make_adamw, make_decoder, mean_loss
from benchmarks.task import Batch, Task
from parallax.mesh import Mesh


class PipelinedLoop:
    """A stage per pipeline rank, the layers in equal parts; with tp above 1 each stage is split by DTensor."""

    def __init__(self, mesh: Mesh, task: Task) -> None:
        layout = mesh.layout
        self.is_first, self.is_last = mesh.pp_rank == 0, mesh.pp_rank == layout.pp - 1
        self.is_counted, self.clip_grad = self.is_last and mesh.tp_rank == 0, task.optimizer.clip_grad
        devices = init_device_mesh("cpu", (layout.pp, layout.tp), mesh_dim_names=("pp", "tp"))
        self.pp, self.tp = devices.get_group("pp"), devices.get_group("tp") if layout.tp > 1 else None
        self.model = make_decoder(task, mesh.pp_rank, layout.pp)
        if self.tp is not None:
            split_over(self.model, devices["tp"])
        self.optimizer = make_adamw(self.model, task)
        stage = PipelineStage(self.model, mesh.pp_rank, layout.pp, torch.device("cpu"), group=self.pp)
        loss = mean_loss if self.tp is None else split_loss
        # By default it divides the gradients by the number of micro-batches.
        self.schedule = Schedule1F1B(stage, task.micro_batches_per_rank(mesh), loss_fn=loss)

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

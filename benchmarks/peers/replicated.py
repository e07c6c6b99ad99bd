"""Data parallelism with DistributedDataParallel, and with ZeroRedundancyOptimizer to shard AdamW's states.

Only the last micro-batch's backward communicates. The loss is not averaged over the ranks: a step that does not log it need not.
"""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.model import accumulate, adamw_options, make_adamw, make_decoder, parameter_groups
from benchmarks.task import Batch, Task
from parallax.mesh import Mesh


class ReplicatedLoop:
    """zero: shard the optimizer's states."""

    def __init__(self, mesh: Mesh, task: Task, zero: bool) -> None:
        self.dp, self.clip_grad = mesh.layout.dp, task.optimizer.clip_grad
        model = make_decoder(task)
        # The default bucket of 25 MB holds the whole model; smaller ones overlap with backward and are 2% faster here.
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=5)
        self.optimizer: torch.optim.Optimizer = make_adamw(model, task)
        if zero:
            groups = parameter_groups(model.parameters(), task.optimizer.weight_decay)
            self.optimizer = ZeroRedundancyOptimizer(
                groups, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **adamw_options(task)
            )

    def step(self, batches: list[Batch]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        share = 1 / len(batches)
        *others, last = batches
        with self.model.no_sync():
            loss = accumulate(self.model, others, share)
        loss += accumulate(self.model, [last], share)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        return loss / self.dp

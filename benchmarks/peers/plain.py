"""One process: gradient accumulation, clipping, fused AdamW."""

from __future__ import annotations

import torch

from benchmarks.peers.model import accumulate, make_adamw, make_decoder
from benchmarks.task import Batch, Task
from parallax.mesh import Mesh


class PlainLoop:
    def __init__(self, mesh: Mesh, task: Task) -> None:
        self.model, self.clip_grad = make_decoder(task), task.optimizer.clip_grad
        self.optimizer = make_adamw(self.model, task)

    def step(self, batches: list[Batch]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = accumulate(self.model, batches, 1 / len(batches))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        return loss

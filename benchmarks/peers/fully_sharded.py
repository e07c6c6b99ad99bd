"""Data parallelism with FSDP2, as it is fastest for a model this small.

zero 1    the model is one group (4% faster here than one for each layer); parameters are gathered once a step and stay so
          between forward and backward (`reshard_after_forward=False`) and over the micro-batches; only the last
          backward reduces gradients, which are whole till then. Memory is as with ZeRO 1, and the weights are there once more
zero 2    the same, but that each backward reduces gradients
zero 3    each layer is a group, is gathered for each use and freed after it; each backward reduces gradients
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.peers.model import accumulate, make_adamw, make_decoder
from benchmarks.task import Batch, Task
from parallax.mesh import Mesh


class FullyShardedLoop:
    """zero: the ZeRO stage that its memory is like, 1 to 3."""

    def __init__(self, mesh: Mesh, task: Task, zero: int) -> None:
        self.dp, self.clip_grad, self.zero = mesh.layout.dp, task.optimizer.clip_grad, zero
        self.model = make_decoder(task)
        devices = init_device_mesh("cpu", (self.dp,))
        if zero == 3:
            for layer in self.model.model.layers.values():
                fully_shard(layer, mesh=devices, reshard_after_forward=True)
        fully_shard(self.model, mesh=devices, reshard_after_forward=zero == 3)
        self.optimizer = make_adamw(self.model, task)

    def step(self, batches: list[Batch]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        share = 1 / len(batches)
        *others, last = batches
        self._communicate(gradients=self.zero >= 2, parameters=self.zero == 3)
        loss = accumulate(self.model, others, share)
        self._communicate(gradients=True, parameters=True)
        loss += accumulate(self.model, [last], share)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        assert isinstance(norm, DTensor), "the norm was taken of the local shards"
        self.optimizer.step()
        return loss / self.dp

    def _communicate(self, gradients: bool, parameters: bool) -> None:
        """Say whether backwards reduce gradients, and free parameters after them."""
        self.model.set_requires_gradient_sync(gradients)
        self.model.set_reshard_after_backward(parameters)
        self.model.set_is_last_backward(gradients)

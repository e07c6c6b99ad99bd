"""What a rank's memory went into, measured in the first step of a run.

weights, gradients, optimizer   the buffers that there are between steps: as `parallax.training.plan` says, to the byte
fp8 weights                     with FP8 only: the copies that its products are of, as many as there were at once; with the
                                reference as the plan says, to the byte. While delayed scaling knows no scale there is nothing
                                in FP8, and the reference keeps float64 values alone
activations                     on a GPU what the step allocated at most beside all these; on a CPU, where nobody counts
                                allocations, the most that autograd kept for backward
other                           the rest of the peak: of what the GPU's allocator holds, or of the process: Python, torch,
                                buffers of communication, and on a CPU what lives for one operation only
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.optimizer import ShardedOptimizer
from parallax.tensor_parallel.precision import Fp8State
from parallax.training.metrics import peak_memory_bytes


class _Kept:
    """A tensor that autograd keeps."""

    __slots__ = ("keeper", "size", "tensor", "where")

    def __init__(self, tensor: torch.Tensor, keeper: KeptMemory) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self.keeper, self.where, self.size = tensor, keeper, storage.data_ptr(), storage.nbytes()
        keeper.add(self)

    def __del__(self) -> None:
        self.keeper.remove(self)


class KeptMemory:
    """Counts the bytes that autograd keeps, each block of memory once. own: addresses of blocks that are not counted."""

    def __init__(self, own: Callable[[], set[int]]) -> None:
        self.bytes = self.peak = 0
        self._own, self._users = own, Counter[int]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is kept of what is computed in here."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: getattr(kept, "tensor", kept)):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        return tensor if tensor.untyped_storage().data_ptr() in self._own() else _Kept(tensor, self)

    def add(self, kept: _Kept) -> None:
        self._users[kept.where] += 1
        if self._users[kept.where] == 1:
            self.bytes += kept.size
            self.peak = max(self.peak, self.bytes)

    def remove(self, kept: _Kept) -> None:
        self._users[kept.where] -= 1
        if not self._users[kept.where]:
            self.bytes -= kept.size


class MemoryReport:
    """Measures a rank's memory in one step. fp8: what FP8 keeps; None without it."""

    def __init__(self, buckets: GradientBuckets, optimizer: ShardedOptimizer, fp8: Fp8State | None = None) -> None:
        self._buckets, self._optimizer, self._fp8 = buckets, optimizer, fp8
        self._activations = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the step that is done in here."""
        with nullcontext() if self._fp8 is None else self._fp8.measuring(), self._watching_activations():
            yield

    @contextmanager
    def _watching_activations(self) -> Iterator[None]:
        device = self._buckets.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            yield
            self._activations = max(0, torch.cuda.max_memory_allocated(device) - before - self._fp8_bytes)
            return
        kept = KeptMemory(self._weight_addresses)
        with kept.watching():
            yield
        self._activations = kept.peak

    def _weight_addresses(self) -> set[int]:
        return {bucket.parameters.untyped_storage().data_ptr() for bucket in self._buckets.buckets}

    @property
    def _fp8_bytes(self) -> int:
        return 0 if self._fp8 is None else self._fp8.meter.peak

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part, of the same parts on every rank."""
        device = self._buckets.device
        peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory_bytes(device)
        parts = {
            "weights": sum(bucket.shard.nbytes for bucket in self._buckets.buckets),
            **({} if self._fp8 is None else {"fp8 weights": self._fp8_bytes}),
            "gradients": sum(bucket.main_grad.nbytes for bucket in self._buckets.buckets),
            "optimizer": self._optimizer.state_bytes,
            "activations": self._activations,
        }
        return parts | {"other": max(0, peak - sum(parts.values()))}

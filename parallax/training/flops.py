"""Model FLOPs utilisation: what share of the devices' peak the model's own operations use.

The peak of a GPU is its dense bf16 rate, whatever precision the run has: half of what data sheets print, who count 2:4 sparsity.
Where there is no entry (a CPU, a GPU not listed), the rate of matrix products in the run's precision is measured once: on a CPU by
the time that its cores worked for them, since on a machine that others use too the clock on the wall counts their work as well.
The model's operations are `parallax.models.config.flops_per_token`: causal attention as half a square, recomputation not
counted (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from parallax.data.encoding.pool import usable_cores

if TYPE_CHECKING:
    import torch

    from parallax.mesh import Mesh
    from parallax.models.config import DecoderConfig

# Dense bf16 FLOP/s with fp32 accumulation, from the makers' data sheets. The first name that is part of torch's device name
# counts, so the special cases stand before the general ones. "H100" alone is the SXM board ("NVIDIA H100 80GB HBM3").
GPU_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("B100", 1750e12),
    ("H200 NVL", 835e12),
    ("GH200", 989.4e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI355X", 2500e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # one of its two dies, which is one device to torch
)


class Work(NamedTuple):
    """What a micro-batch or more hold: labels to predict, tokens, and the sum of the squares of the lengths of their documents.

    Padding is no token. A row without documents is one document.
    """

    targets: float
    tokens: float
    squares: float

    def flops(self, model: DecoderConfig) -> float:
        """Return the model's own operations: attention's are in proportion to the squares."""
        from parallax.models.config import flops_per_token

        return self.tokens * flops_per_token(model, self.squares / self.tokens) if self.tokens else 0.0


NO_WORK = Work(0, 0, 0)


def work_of(labels: torch.Tensor, lengths: Sequence[int] = ()) -> Work:
    """Return the work of a micro-batch that is on the host, labels `[batch, seq]`; lengths: of its documents, row after row.

    A document of which nothing is learned is padding: the data has no other.
    """
    import torch

    from parallax.tensor_parallel.vocabulary import IGNORE_INDEX

    sizes = torch.tensor(lengths or [labels.shape[1]] * len(labels))
    learned_up_to = (labels != IGNORE_INDEX).view(-1).cumsum(0)[sizes.cumsum(0) - 1]
    used = sizes[learned_up_to.diff(prepend=torch.zeros(1, dtype=torch.int64)) > 0]
    return Work(int(learned_up_to[-1]), int(used.sum()), int((used**2).sum()))


def gpu_peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of the GPU with torch's device name `name`, or None if it is not listed."""
    words = name.lower().replace("-", " ").split()
    for model, peak in GPU_PEAK_FLOPS:
        parts = model.lower().split()
        if any(words[i : i + len(parts)] == parts for i in range(len(words))):
            return peak
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of one device: of the GPU by its name, else of matrix products in `dtype`, measured now."""
    import torch

    if device.type == "cuda":
        peak = gpu_peak_flops(torch.cuda.get_device_name(device))
        return peak if peak is not None else measured_flops(device, dtype, sizes=(8192,))
    return measured_flops(device, dtype)


def total_peak_flops(mesh: Mesh, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of all ranks' devices together; called by all ranks.

    CPU ranks of one host share its cores: together they have no more than the cores have.
    """
    import torch

    from parallax.collectives import all_reduce_, barrier

    barrier(mesh.world)
    peak = torch.tensor(peak_flops(mesh.device, dtype), dtype=torch.float64, device=mesh.device)
    if mesh.device.type == "cpu":
        peak *= share_of_cores(torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), usable_cores())
    return all_reduce_(peak, mesh.world).item()


def share_of_cores(threads: int, ranks: int, cores: int) -> float:
    """Return what part of a core each thread has, of `ranks` processes of one host with `threads` each."""
    return min(1.0, cores / (ranks * threads))


def measured_flops(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int] = (512, 1024, 2048), budget_seconds: float = 0.3
) -> float:
    """Return the best FLOP/s of square matrix products, on a CPU with as many threads as torch has now.

    sizes: rows and columns, tried in turn: the largest is the best where there are many cores, and takes 170 ms of one. What would
    take longer than `budget_seconds` alone is left out, such as bf16 on a CPU that computes it in fp32, 50 times slower.
    """
    import torch

    def clock() -> float:
        """Return seconds: of one thread its own, so that others' use of its core does not count; of several those of the clock.

        Threads wait for each other asleep, so the sum of theirs says less than the clock.
        """
        if device.type != "cuda":
            return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    def fastest(size: int, attempts: int) -> float:
        """Return the least seconds of several products."""
        left, right, result = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
        seconds = []
        for _ in range(attempts):
            started = clock()
            torch.mm(left, right, out=result)
            seconds.append(clock() - started)
        return min(taken for taken in seconds if taken)

    best, end = 0.0, time.perf_counter() + budget_seconds
    tried: list[int] = []
    for size in sorted(sizes):
        if tried and 2.0 * size**3 / best > budget_seconds:
            break
        tried.append(size)
        best = max(best, 2.0 * size**3 / fastest(size, attempts=3))
    while time.perf_counter() < end:
        best = max(best, *(2.0 * size**3 / fastest(size, attempts=2) for size in tried))
    return best


def mfu(flops_per_second: float, total_peak_flops: float) -> float | None:
    """Return the share, 0 to 1, of all devices' peak FLOP/s that the model's operations used.

    None if it is more than all, which cannot be: then the peak was measured while others used the machine.
    """
    share = flops_per_second / total_peak_flops
    return share if share <= 1 else None

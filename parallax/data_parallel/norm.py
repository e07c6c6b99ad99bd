"""The global gradient norm, every parameter counted once whatever holds copies of it.

Each rank sums the squares of the slices it owns; no element has two owners in the world, so one sum over the world is the
square of the norm, whatever the tp, pp, ZeRO stage, tied or replicated weights. Clipping by the norm of a stage or a rank
would give each its own factor.
"""

from __future__ import annotations

import torch

from parallax.data_parallel.bucket import GradientBuckets


def local_squared_norm(buckets: GradientBuckets) -> torch.Tensor:
    """Return this rank's part of the squared gradient norm, a float64 scalar, after `finish()`.

    The norm is the root of the sum of these over all ranks of the world.
    """
    buckets.check_finished("the norm of the gradient")
    total = torch.zeros((), dtype=torch.float64, device=buckets.device)
    for bucket in buckets.buckets:
        total += squared_norm(bucket.grad(bucket.owned))
    return total


def squared_norm(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a flat tensor, a float64 scalar.

    Sums in fp32 would depend on where the ranks' slices end, and the factor that all gradients are clipped by would round to
    another fp32 number in one layout than in another.
    """
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    # Elements made fp64 at a time: on a CPU what its cache holds.
    for chunk in flat.split(1 << 16 if flat.device.type == "cpu" else 1 << 22):
        exact = chunk.double()
        total += torch.dot(exact, exact)
    return total


def clip_coefficient(total_norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor, at most 1, that brings gradients of `total_norm` down to norm `limit`; 1 for a limit of 0.

    A scalar on the device of `total_norm`; nothing waits for its value.
    """
    if limit == 0:
        return torch.ones_like(total_norm)
    return (limit / total_norm).clamp(max=1.0)

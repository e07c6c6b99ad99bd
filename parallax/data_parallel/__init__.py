"""Data parallelism: gradients summed over all holders of a parameter, ZeRO-sharded AdamW, one global gradient norm.

    plan       which parameters share a flat bucket, and where in it each one lies (pure)
    sink       how a parameter's gradient reaches its bucket, and when it is complete
    bucket     the buckets: accumulate, reduce while backward runs, spread updated parameters
    norm       the gradient norm, every parameter counted once
    optimizer  AdamW on the slices that this rank owns

The only notion of a group here is that of a parameter's holders (`parallax.mesh.Replicas`): its data-parallel replicas and,
where there are such, the tp ranks or the pipeline stages that have a copy too. The gradient is summed over all of them, and
ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) shards over all of them: each element has one owner in the world, and all
copies stay bitwise equal, because they are sent by that owner or computed from the same numbers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.data_parallel.bucket import GradientBuckets
    from parallax.data_parallel.norm import clip_coefficient, local_squared_norm
    from parallax.data_parallel.optimizer import ShardedAdamW
    from parallax.data_parallel.options import OptimizerOptions
    from parallax.data_parallel.plan import plan_buckets

_HOMES = {
    "GradientBuckets": "bucket",
    "OptimizerOptions": "options",
    "ShardedAdamW": "optimizer",
    "clip_coefficient": "norm",
    "local_squared_norm": "norm",
    "plan_buckets": "plan",
}

__all__ = [
    "GradientBuckets",
    "OptimizerOptions",
    "ShardedAdamW",
    "clip_coefficient",
    "local_squared_norm",
    "plan_buckets",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

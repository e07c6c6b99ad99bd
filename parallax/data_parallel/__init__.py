"""Data parallelism: gradients summed over all holders of a parameter, ZeRO-sharded optimizers, one global gradient norm.

    plan       which parameters share a flat bucket, where in it each one lies, and how its holders divide it (pure)
    sink       how a parameter's gradient reaches its bucket, and when it is complete
    flat       one bucket: its memory, the levels of its reduction, its parameters' gathering
    wire       sums in the type that is sent
    bucket     all buckets of a rank: accumulate, reduce while backward runs, spread updated parameters
    gather     ZeRO 3: parameters gathered around each use
    absent     what one of them is in between
    norm       the gradient norm, every parameter counted once
    rules      AdamW and SGD on flat slices
    muon       Muon, on whole matrices
    optimizer  the rules on the slices that this rank keeps

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
    from parallax.data_parallel.optimizer import ShardedAdamW, ShardedOptimizer, make_optimizer, rule_of
    from parallax.data_parallel.options import OptimizerOptions
    from parallax.data_parallel.plan import plan_buckets

_HOMES = {
    "GradientBuckets": "bucket",
    "OptimizerOptions": "options",
    "ShardedAdamW": "optimizer",
    "ShardedOptimizer": "optimizer",
    "clip_coefficient": "norm",
    "local_squared_norm": "norm",
    "make_optimizer": "optimizer",
    "plan_buckets": "plan",
    "rule_of": "optimizer",
}

__all__ = [
    "GradientBuckets",
    "OptimizerOptions",
    "ShardedAdamW",
    "ShardedOptimizer",
    "clip_coefficient",
    "local_squared_norm",
    "make_optimizer",
    "plan_buckets",
    "rule_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

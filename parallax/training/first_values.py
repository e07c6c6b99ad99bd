"""The model's first values, made bucket by bucket, so that no rank ever has more of it than it keeps and one bucket.

Stages are shaped on torch's meta device. Their parameters get a device and a type, but no memory; the buckets make that, one after
the other, and have it filled. Under ZeRO 3 a bucket is a layer, or a part of one, whose other ranks' parts are freed before
the next one is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from parallax.tensor_parallel.facts import ParameterFacts, initial_values


def give_places(stages: Iterable[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Replace the parameters of stages on the meta device by ones of `dtype` on `device`, whose memory is still to be made."""
    for module in {module: None for stage in stages for module in stage.modules()}:
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            values.untyped_storage().resize_(0)
            setattr(module, name, nn.Parameter(values))


class FirstValues:
    """The initial values of a seed, in fp32 rounded to the parameter's type; see `GradientBuckets`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, name: str, facts: ParameterFacts, zeros: torch.Tensor) -> None:
        """Write the values of a parameter into zeros of its local shape; padding stays zero."""
        facts.held(zeros).copy_(torch.from_numpy(initial_values(name, facts, self.seed)))

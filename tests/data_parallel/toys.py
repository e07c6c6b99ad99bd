"""Small models whose right gradients are easy to say, and the way from ranks' slices back to whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from parallax.data_parallel.bucket import GradientBuckets
from parallax.mesh import Layout, Mesh
from parallax.tensor_parallel.facts import ParameterFacts, named_parameters_with_facts
from parallax.tensor_parallel.linear import ColumnParallelLinear
from parallax.tensor_parallel.norm import LayerNorm

BUCKET = 64  # elements: many buckets for a small model

# Elements of parameters: smaller than a group, around a bucket's limit, larger than several buckets; see `given`.
EDGE_SIZES = (0, 1, 3, BUCKET - 1, BUCKET, BUCKET + 1, 5 * BUCKET)


def alone() -> Mesh:
    """Return the mesh of one process."""
    return Mesh(Layout(), 0, torch.device("cpu"))


def model() -> nn.Sequential:
    """Return a model of layers whose weights have sinks, and norms and biases whose gradients come from autograd."""
    torch.manual_seed(3)
    layers = nn.Sequential(
        ColumnParallelLinear(7, 33, bias=True, std=0.5),
        LayerNorm(33),
        nn.Tanh(),
        ColumnParallelLinear(33, 20, bias=True, std=0.5),
        nn.Linear(20, 5),
    )
    layers.register_parameter("unused", nn.Parameter(torch.ones(3)))
    layers.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
    return layers


def buckets_of(module: nn.Module, mesh: Mesh, zero: int = 1, bucket_elements: int = BUCKET) -> GradientBuckets:
    """Return the buckets of a module's parameters."""
    return GradientBuckets(list(named_parameters_with_facts(module)), mesh, zero=zero, bucket_elements=bucket_elements)


def micro_batches(rank: int, count: int) -> list[torch.Tensor]:
    """Return `count` inputs `[4, 3, 7]` of a rank, all different."""
    return [torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(100 * rank + i)) for i in range(count)]


def loss(module: nn.Module, batches: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the summed loss of all `batches`."""
    return torch.stack([module(batch).square().sum() for batch in batches]).sum()


def given(values: Mapping[str, torch.Tensor], decays: Mapping[str, bool] | None = None) -> list:
    """Return parameters of these values, as buckets take them; without `decays` matrices do."""
    return [
        (
            name,
            nn.Parameter(value.clone()),
            ParameterFacts(tuple(value.shape), decays=value.ndim > 1 if decays is None else decays[name]),
        )
        for name, value in values.items()
    ]


def backward_of(parameters: Iterable[tuple[str, nn.Parameter, ParameterFacts]], gradients: Mapping) -> None:
    """Run a backward in which each named parameter gets exactly the given gradient."""
    products = [(parameter * gradients[name]).sum() for name, parameter, _ in parameters if name in gradients]
    torch.stack(products).sum().backward()


def poison(buckets: GradientBuckets) -> None:
    """Overwrite the part of the reduced gradients that is said to be undefined."""
    for bucket in buckets.buckets:
        first = bucket.grad_part.start
        bucket.main_grad[: bucket.kept.start - first] = torch.nan
        bucket.main_grad[bucket.kept.stop - first :] = torch.nan


Slices = dict[str, list[tuple[int, torch.Tensor]]]


def owned_gradients(buckets: GradientBuckets) -> Slices:
    """Return, by parameter, where in it this rank's owned part starts and the gradient of that part."""
    slices: Slices = {}
    for bucket in buckets.buckets:
        for place in bucket.plan.places:
            start, stop = max(place.offset, bucket.owned.start), min(place.stop, bucket.owned.stop)
            if start < stop:
                slices.setdefault(place.name, []).append(
                    (start - place.offset, bucket.grad(slice(start, stop)).clone())
                )
    return slices


def join(ranks: Sequence[Slices], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Put the slices of all ranks together; fail unless every element has exactly one owner."""
    result = {}
    for name, shape in shapes.items():
        pieces = sorted((piece for slices in ranks for piece in slices.get(name, [])), key=lambda piece: piece[0])
        position = 0
        for start, values in pieces:
            assert start == position, (name, start, position)
            position += values.numel()
        assert position == shape.numel(), (name, position)
        result[name] = torch.cat([torch.empty(0), *(values for _, values in pieces)]).view(shape)
    return result

"""Parameters of every awkward size, in every sharding: three accumulated backwards a step, against torch's AdamW."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from parallax.collectives import all_reduce_, same_on_all
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.norm import clip_coefficient, local_squared_norm
from parallax.data_parallel.optimizer import ShardedAdamW
from parallax.data_parallel.options import ZERO_STAGES
from parallax.mesh import Mesh
from parallax.tensor_parallel.scopes import ParameterScope
from tests.data_parallel import toys
from tests.distributed.harness import run_ranks

STEPS, ACCUMULATED, CLIP, RATE = 3, 3, 1.0, 1e-2
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = {f"p{size}": (size,) for size in toys.EDGE_SIZES} | {"matrix": (9, 13), "wide": (2, 70), "unused": (5, 5)}
FROZEN = "frozen"


def _values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} | {FROZEN: torch.ones(7)}


def _gradients(rank: int, step: int, number: int) -> dict[str, torch.Tensor]:
    """Gradients of one backward; not all of them use the wide matrix, and none the unused one."""
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    used = [name for name in SHAPES if name != "unused" and not (name == "wide" and (number + rank) % 2)]
    return {name: torch.randn(SHAPES[name], generator=generator) for name in used}


def _train(mesh: Mesh, zero: int, zero_group: int | None, announced: bool) -> dict[str, Any]:
    parameters = toys.given(_values())
    next(parameter for name, parameter, _ in parameters if name == FROZEN).requires_grad_(False)
    scopes = _scopes(parameters)
    buckets = GradientBuckets(
        parameters, mesh, zero=zero, zero_group=zero_group, bucket_elements=toys.BUCKET, scopes=[scopes]
    )
    optimizer = ShardedAdamW(buckets, **SETTINGS)
    norms = []
    for step in range(STEPS):
        buckets.zero_grad()
        for number in range(ACCUMULATED):
            if number == ACCUMULATED - 1:
                buckets.expect_last_backward()
            if announced:
                buckets.before_backward()
            _backward(scopes, parameters, _gradients(mesh.rank, step, number))
            if announced:
                buckets.after_backward()
        buckets.finish()
        norms.append(all_reduce_(local_squared_norm(buckets), mesh.world).sqrt())
        toys.poison(buckets)
        optimizer.step(RATE, clip_coefficient(norms[-1], CLIP))
    for scope in scopes:
        scope.entered(torch.ones(()))  # ZeRO 3 has no whole parameters otherwise
    assert all(same_on_all(parameter, mesh.dp) for _, parameter, _ in parameters)
    return {name: parameter.detach() for name, parameter, _ in parameters} | {"norms": torch.stack(norms)}


def _scopes(parameters: list) -> list[ParameterScope]:
    """Return three scopes, of every third parameter each."""
    return [ParameterScope(f"scope{i}", lambda i=i: [entry[1] for entry in parameters[i::3]]) for i in range(3)]


def _backward(scopes: list[ParameterScope], parameters: list, gradients: dict[str, torch.Tensor]) -> None:
    """Run a backward in which each parameter gets exactly the given gradient, scope by scope."""
    hidden = torch.ones(())
    for i, scope in enumerate(scopes):
        hidden = scope.entered(hidden)
        products = [(parameter * gradients[name]).sum() for name, parameter, _ in parameters[i::3] if name in gradients]
        hidden = scope.left(hidden + torch.stack(products).sum())
    hidden.backward()


def _all(mesh: Mesh) -> dict[tuple, dict[str, Any]]:
    groups = [None, *(size for size in (2,) if mesh.layout.dp % size == 0 and mesh.layout.dp > size)]
    cases = [(zero, group, True) for zero in ZERO_STAGES for group in groups if zero or group is None]
    return {case: _train(mesh, *case) for case in [*cases, (2, None, False)]}


@functools.cache
def _reference(ranks: int) -> dict[str, torch.Tensor]:
    whole = {name: nn.Parameter(value) for name, value in _values().items()}
    decays = [whole[name] for name in whole if whole[name].ndim > 1]
    others = [whole[name] for name in whole if whole[name].ndim <= 1 and name != FROZEN]
    optimizer = torch.optim.AdamW(
        [{"params": decays}, {"params": others, "weight_decay": 0.0}], lr=RATE, **SETTINGS, fused=False
    )
    norms = []
    for step in range(STEPS):
        for name in SHAPES:
            whole[name].grad = torch.zeros(SHAPES[name])
        for number in range(ACCUMULATED):
            for rank in range(ranks):
                for name, gradient in _gradients(rank, step, number).items():
                    whole[name].grad += gradient
        norms.append(nn.utils.clip_grad_norm_([whole[name] for name in SHAPES], CLIP).double())
        optimizer.step()
    return {name: parameter.detach() for name, parameter in whole.items()} | {"norms": torch.stack(norms)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_size_in_every_sharding_equals_torch_adamw(ranks: int) -> None:
    right = _reference(ranks)
    for results in run_ranks(ranks, _all) if ranks > 1 else [_all(toys.alone())]:
        for case, found in results.items():
            for name, expected in right.items():
                torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6, msg=f"{case} {name}")

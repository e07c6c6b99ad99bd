"""Gradients and states in narrow types: what is rounded, when, and that it is the same in every sharding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from parallax.collectives import same_on_all
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.flat import GradientTypes
from parallax.data_parallel.optimizer import ShardedOptimizer
from parallax.data_parallel.options import ZERO_STAGES
from parallax.data_parallel.rules import SGD, AdamW
from parallax.mesh import Mesh
from tests.data_parallel import toys
from tests.distributed.harness import run_ranks

RANKS = 3
BF16 = torch.bfloat16
SHAPES = {"matrix": (9, 13), "wide": (2, 70), "norm": (33,)}


def _gradients(rank: int, number: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _buckets(
    mesh: Mesh, zero: int, types: GradientTypes, rule: str = "adamw", dtype: torch.dtype = torch.float32
) -> Any:
    parameters = toys.given({name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()})
    buckets = GradientBuckets(
        parameters, mesh, zero=zero, bucket_elements=toys.BUCKET, types=types, rule=lambda facts: rule
    )
    return parameters, buckets


def _reduced(mesh: Mesh) -> dict[tuple[str, int], toys.Slices]:
    """Owned gradients of one backward, by the types of the main gradient and of the wire, over shared memory and over gloo."""
    results = {}
    gloo = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
    for where, transport in (("shared", mesh), ("gloo", gloo)):
        for name, types in (
            ("wire", GradientTypes(wire=BF16)),
            ("both", GradientTypes(BF16, BF16)),
            ("main", GradientTypes(BF16)),
        ):
            for zero in ZERO_STAGES:
                parameters, buckets = _buckets(transport, zero, types)
                toys.backward_of(parameters, _gradients(mesh.rank))
                buckets.finish()
                if zero == 0:
                    assert all(same_on_all(bucket.main_grad, mesh.dp) for bucket in buckets.buckets)
                results[where, name, zero] = toys.owned_gradients(buckets)
    return results


def _five_steps(mesh: Mesh) -> dict[tuple, dict[str, torch.Tensor]]:
    """Parameters after five steps of two backwards each, by rule, type of the moments and sharding."""
    results = {}
    for rule, moments in (("adamw", BF16), ("sgd", BF16), ("sgd", None)):
        for zero in ZERO_STAGES:
            parameters, buckets = _buckets(mesh, zero, GradientTypes(), rule, BF16 if moments else torch.float32)
            rules = {"adamw": AdamW()} if rule == "adamw" else {"sgd": SGD()}
            optimizer = ShardedOptimizer(buckets, rules, moments)
            for step in range(5):
                buckets.zero_grad()
                for number in range(2):
                    buckets.before_backward()
                    exact = {
                        name: (64 * gradient).round() / 64
                        for name, gradient in _gradients(mesh.rank, 2 * step + number).items()
                    }
                    toys.backward_of(parameters, exact)
                    buckets.after_backward()
                buckets.finish()
                optimizer.step(1e-2)
                for bucket in buckets.buckets:
                    assert torch.equal(bucket.values(bucket.kept), bucket.main_params.to(bucket.parameters.dtype))
            results[rule, moments, zero] = {name: parameter.detach() for name, parameter, _ in parameters}
            states = [piece.tensors.items() for name in SHAPES for piece in optimizer.pieces(name)]
            for kind, state in (entry for entries in states for entry in entries):
                assert state.dtype == (torch.float32 if kind == "main_param" or moments is None else BF16)
    return results


def _all(mesh: Mesh) -> dict[str, Any]:
    return {case.__name__: case(mesh) for case in (_reduced, _five_steps)}


@functools.cache
def _results() -> list[dict[str, Any]]:
    return run_ranks(RANKS, _all)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(BF16).float()


@pytest.mark.parametrize("where", ["shared", "gloo"])
def test_a_bf16_wire_rounds_what_each_rank_sends_and_adds_in_fp32(where: str) -> None:
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    sent = [{name: _rounded(gradient) for name, gradient in _gradients(rank).items()} for rank in range(RANKS)]
    for name in SHAPES:
        total = sent[0][name] + sent[1][name] + sent[2][name]
        for kind, expected in (("wire", total), ("both", _rounded(total)), ("main", _rounded(total))):
            for zero in ZERO_STAGES:
                found = toys.join([result["_reduced"][where, kind, zero] for result in _results()], shapes)[
                    name
                ].float()
                # An AllReduce sends the sum as well, in bf16; elsewhere it stays as it was added.
                right = _rounded(total) if zero == 0 else expected
                assert torch.equal(found, right), (kind, zero)


def test_narrow_moments_are_the_same_in_every_sharding_and_near_wide_ones() -> None:
    for result in _results():
        found = result["_five_steps"]
        for rule, moments in (("adamw", BF16), ("sgd", BF16), ("sgd", None)):
            for zero in ZERO_STAGES:
                for name in SHAPES:
                    assert torch.equal(found[rule, moments, zero][name], found[rule, moments, 0][name])
        for name in SHAPES:
            torch.testing.assert_close(
                found["sgd", BF16, 0][name].float(), found["sgd", None, 0][name], rtol=0.02, atol=0.005
            )


def test_sgd_is_that_of_torch() -> None:
    whole = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    reference = torch.optim.SGD(
        [
            {"params": [whole["matrix"], whole["wide"]], "weight_decay": 0.1},
            {"params": [whole["norm"]], "weight_decay": 0.0},
        ],
        lr=1e-2,
        momentum=0.9,
    )
    for step in range(5):
        for name, parameter in whole.items():
            every = [_gradients(rank, 2 * step + number)[name] for number in range(2) for rank in range(RANKS)]
            parameter.grad = torch.stack([(64 * gradient).round() / 64 for gradient in every]).sum(0)
        reference.step()
    for name, parameter in whole.items():
        for zero in ZERO_STAGES:
            found = _results()[0]["_five_steps"]["sgd", None, zero][name]
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-6, atol=1e-6)

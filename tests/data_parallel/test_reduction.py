"""Gradients summed over real processes, against one process that sees all the data."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from torch import nn

from parallax.collectives import same_on_all
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.options import ZERO_STAGES
from parallax.mesh import Layout, Mesh, Replicas
from parallax.tensor_parallel.facts import ParameterFacts
from tests.data_parallel import toys
from tests.distributed.harness import run_layout, run_ranks

ACCUMULATED = 4  # micro-batches


def _accumulate(mesh: Mesh) -> dict[int, list[toys.Slices]]:
    """Two steps under each ZeRO stage; return the owned gradients of each."""
    results: dict[int, list[toys.Slices]] = {}
    for zero in ZERO_STAGES:
        module = toys.model()
        buckets = toys.buckets_of(module, mesh, zero)
        results[zero] = []
        for step in range(2):
            buckets.zero_grad()
            assert not any(bucket.main_grad.any() for bucket in buckets.buckets)
            batches = toys.micro_batches(mesh.rank + 10 * step, ACCUMULATED)
            for batch in batches:
                if batch is batches[-1]:
                    buckets.expect_last_backward()
                buckets.before_backward()
                toys.loss(module, [batch]).backward()
                buckets.after_backward()
                assert all(bucket.whole_grad is None for bucket in buckets.buckets)
            buckets.finish()
            if zero == 0:
                assert all(same_on_all(bucket.main_grad, mesh.dp) for bucket in buckets.buckets)
            toys.poison(buckets)
            results[zero].append(toys.owned_gradients(buckets))
        assert module.frozen.grad is None and not hasattr(module.frozen, "main_grad")
    return results


@functools.cache
def _results(ranks: int) -> dict[str, list]:
    """Return, by case, the results of all ranks; one world runs all cases, since its start is what takes time."""
    every = run_ranks(ranks, _cases)
    return {name: [result[name] for result in every] for name in every[0]}


def _cases(mesh: Mesh) -> dict[str, Any]:
    return {case.__name__: case(mesh) for case in (_accumulate, _edge_sizes, _overlap, _different_models)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_accumulated_steps_equal_the_one_process_sums(ranks: int) -> None:
    results = _results(ranks)["_accumulate"]
    for step in range(2):
        module = toys.model()
        for rank in range(ranks):
            toys.loss(module, toys.micro_batches(rank + 10 * step, ACCUMULATED)).backward()
        right = {name: p for name, p in module.named_parameters() if p.requires_grad}
        shapes = {name: p.shape for name, p in right.items()}
        found = [toys.join([result[zero][step] for result in results], shapes) for zero in ZERO_STAGES]
        for name, parameter in right.items():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for gradients in found:
                torch.testing.assert_close(
                    gradients[name], expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())
                )
            assert torch.equal(found[0][name], found[1][name])


def _edge_sizes(mesh: Mesh) -> list[toys.Slices]:
    values = {f"p{size}": torch.zeros(size) for size in toys.EDGE_SIZES}
    results = []
    for zero in ZERO_STAGES:
        parameters = toys.given(values)
        buckets = GradientBuckets(parameters, mesh, zero=zero, bucket_elements=toys.BUCKET)
        buckets.expect_last_backward()
        toys.backward_of(parameters, {name: torch.arange(v.numel()) + 1000.0 * mesh.rank for name, v in values.items()})
        buckets.finish()
        results.append(toys.owned_gradients(buckets))
    return results


def test_parameters_of_every_size_around_a_bucket_are_summed() -> None:
    results = _results(3)["_edge_sizes"]
    shapes = {f"p{size}": torch.Size([size]) for size in toys.EDGE_SIZES}
    for zero in ZERO_STAGES:
        for name, got in toys.join([result[zero] for result in results], shapes).items():
            assert torch.equal(got, 3 * torch.arange(got.numel()) + 3000.0), name


class _SlowLayer(torch.autograd.Function):
    """A layer before the first whose backward goes on until a reduction of later layers is done, or two seconds."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, buckets: GradientBuckets, seen: list) -> torch.Tensor:
        ctx.buckets, ctx.seen = buckets, seen
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        give_up = time.monotonic() + 2
        work = ctx.buckets.buckets[0].reduction
        while hasattr(work, "is_completed") and not work.is_completed() and time.monotonic() < give_up:
            time.sleep(0.001)
        ctx.seen.append(hasattr(work, "is_completed") and work.is_completed())
        return gradient, None, None


def _overlap(mesh: Mesh) -> list[bool]:
    module, seen = toys.model(), []
    # What goes through shared memory is complete when it returns; gloo's threads work in the background.
    mesh = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
    buckets = toys.buckets_of(module, mesh)
    for index, batch in enumerate(toys.micro_batches(mesh.rank, 2)):
        if index == 1:
            buckets.expect_last_backward()
        toys.loss(module, [_SlowLayer.apply(batch.requires_grad_(), buckets, seen)]).backward()
    buckets.finish()
    return seen


def test_a_reduction_runs_and_ends_while_the_last_backward_goes_on() -> None:
    assert _results(2)["_overlap"] == [[False, True]] * 2


def _with_facts(**facts: ParameterFacts) -> list:
    return [(name, nn.Parameter(torch.zeros(fact.full_shape)), fact) for name, fact in facts.items()]


def _replicated_over_tp(mesh: Mesh) -> dict[str, float]:
    """Every rank's local gradient is its global rank + 1, or dp rank + 1 where tp ranks compute the same."""
    tp = mesh.layout.tp
    parameters = _with_facts(
        norm=ParameterFacts((3,), replicas=Replicas(tp=tp), partial=True, decays=False),
        bias=ParameterFacts((3,), replicas=Replicas(tp=tp), decays=False),
        sharded=ParameterFacts((3,)),
        shared_by_two=ParameterFacts((3,), replicas=Replicas(tp=2), partial=True),
    )
    buckets = GradientBuckets(parameters, mesh, zero=0)
    gradients = {name: torch.full((3,), mesh.rank + 1.0) for name, _, _ in parameters}
    gradients["bias"] = torch.full((3,), mesh.dp_rank + 1.0)
    buckets.expect_last_backward()
    toys.backward_of(parameters, gradients)
    buckets.finish()
    return {name: parameter.main_grad[0].item() for name, parameter, _ in parameters}


def test_copies_along_tp_get_the_sum_of_parts_and_the_whole_gradient_once() -> None:
    # tp 2: a norm under sequence parallelism with local gradients 1 and 2, and a bias whose gradient is 1 on both.
    right = {"norm": 3.0, "bias": 1.0, "shared_by_two": 3.0}
    assert run_layout(Layout(tp=2), _replicated_over_tp) == [right | {"sharded": 1.0}, right | {"sharded": 2.0}]


@pytest.mark.slow
def test_copies_along_tp_are_summed_over_dp_as_well() -> None:
    right = {"norm": 10.0, "bias": 3.0, "shared_by_two": 10.0}
    expected = [right | {"sharded": value} for value in (4.0, 6.0, 4.0, 6.0)]
    assert run_layout(Layout(tp=2, dp=2), _replicated_over_tp) == expected


@pytest.mark.slow
def test_kv_heads_shared_by_neighbours_are_summed_over_those() -> None:
    results = run_layout(Layout(tp=4), _replicated_over_tp)
    assert [result["shared_by_two"] for result in results] == [3.0, 3.0, 7.0, 7.0]
    assert [result["norm"] for result in results] == [10.0] * 4


def _different_models(mesh: Mesh) -> str:
    parameters = _with_facts(weight=ParameterFacts((3 + mesh.rank,)))
    try:
        GradientBuckets(parameters, mesh)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_parameters_are_told_apart_before_anything_hangs() -> None:
    assert all(
        "ranks 0, 1 hold the same parameters, but the names, sizes" in message
        for message in _results(2)["_different_models"]
    )

"""Muon: torch's own on whole matrices, the same in every sharding; how its work is divided."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from parallax.collectives import all_reduce_
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.muon import describe, is_for_muon, orthogonalize, plan_matrices
from parallax.data_parallel.norm import clip_coefficient, local_squared_norm
from parallax.data_parallel.optimizer import ShardedOptimizer, make_optimizer, rule_of
from parallax.data_parallel.options import ZERO_STAGES, OptimizerOptions
from parallax.mesh import Layout, Mesh, Replicas
from parallax.tensor_parallel.facts import ParameterFacts
from tests.data_parallel import toys
from tests.distributed.harness import run_layout

STEPS, RATE, CLIP, DECAY = 3, 2e-2, 1.0, 0.1
# A column-parallel matrix, a row-parallel one, one KV head that two ranks share, a matrix that every rank holds, and what is left.
SHAPES = {"column": (12, 7), "row": (5, 24), "shared": (6, 7), "whole": (9, 9), "norm": (7,), "table": (16, 3)}
MATRICES = ("column", "row", "shared", "whole")


def _full(step: int, rank: int | None) -> dict[str, torch.Tensor]:
    """Weights (rank None), or gradients of a dp rank whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * step + (rank or 0) + (50 if rank is None else 0))
    return {name: torch.randint(-512, 512, shape, generator=generator) / 512 for name, shape in SHAPES.items()}


def _facts(name: str, mesh: Mesh) -> ParameterFacts:
    shape, tp = SHAPES[name], mesh.layout.tp
    if name in ("column", "row"):
        dim = 0 if name == "column" else 1
        rows = shape[dim] // tp
        return ParameterFacts(shape, dim, mesh.tp_rank * rows, rows)
    shared = Replicas(tp=tp)
    return ParameterFacts(shape, replicas=shared, decays=len(shape) > 1, is_table=name == "table")


def _slice(facts: ParameterFacts, full: torch.Tensor) -> torch.Tensor:
    return full if facts.shard_dim is None else full.narrow(facts.shard_dim, facts.shard_start, facts.shard_rows)


def _build(
    mesh: Mesh, zero: int, zero_group: int | None, dtype: torch.dtype
) -> tuple[list, GradientBuckets, ShardedOptimizer]:
    options = OptimizerOptions("muon", zero, zero_group, weight_decay=DECAY)
    weights = _full(0, None)
    parameters = [
        (name, nn.Parameter(_slice(_facts(name, mesh), weights[name]).to(dtype)), _facts(name, mesh)) for name in SHAPES
    ]
    buckets = GradientBuckets(
        parameters, mesh, zero=zero, zero_group=zero_group, bucket_elements=toys.BUCKET, rule=rule_of(options)
    )
    return parameters, buckets, make_optimizer(buckets, options)


def _step(mesh: Mesh, built: tuple, step: int, skip: bool = False) -> None:
    parameters, buckets, optimizer = built
    gradients = {name: _slice(facts, _full(step, mesh.dp_rank)[name]) for name, _, facts in parameters}
    buckets.zero_grad()
    toys.backward_of(parameters, gradients)
    buckets.finish()
    norm = all_reduce_(local_squared_norm(buckets), mesh.world).sqrt()
    optimizer.step(RATE, clip_coefficient(norm, CLIP), torch.tensor(float(skip)))


def _cases(mesh: Mesh) -> list[tuple[int, int | None, torch.dtype]]:
    groups = [None, *([2] if mesh.layout.dp == 4 else [])]
    dtypes = (torch.float32, torch.bfloat16)
    return [(zero, group, dtype) for zero in ZERO_STAGES for group in groups if zero or not group for dtype in dtypes]


def _train(mesh: Mesh) -> dict[tuple, dict[str, torch.Tensor]]:
    """Main parameters of this rank's slices, as whole local tensors, after three steps and one that is skipped."""
    results = {}
    for case in _cases(mesh):
        built = _build(mesh, *case)
        for step in range(STEPS):
            _step(mesh, built, step)
        before = {name: parameter.detach().clone() for name, parameter, _ in built[0]}
        _step(mesh, built, 9, skip=True)
        built[2].take_back_count()
        assert all(torch.equal(parameter, before[name]) for name, parameter, _ in built[0])
        kinds = {name: {kind for piece in built[2].pieces(name) for kind in piece.tensors} for name in SHAPES}
        assert all(kinds[name] <= {"momentum_buffer", "main_param"} for name in MATRICES), kinds
        results[case] = before
    return results


def _resumed(mesh: Mesh) -> bool:
    """Whether states that are copied, by pieces, into another optimizer go on bitwise."""
    first, second, unbroken = (_build(mesh, 1, None, torch.bfloat16) for _ in range(3))
    for step in range(4):
        _step(mesh, unbroken, step)
    for step in range(2):
        _step(mesh, first, step)
    for (name, target, _), (_, source, _) in zip(second[0], first[0], strict=True):
        target.detach().copy_(source.detach())
        for into, out in zip(second[2].pieces(name), first[2].pieces(name), strict=True):
            for kind, tensor in into.tensors.items():
                tensor.copy_(out.tensors[kind])
    second[2].step_count = first[2].step_count
    for step in (2, 3):
        _step(mesh, second, step)
    return all(torch.equal(mine, other) for (_, mine, _), (_, other, _) in zip(second[0], unbroken[0], strict=True))


def _all(mesh: Mesh) -> dict[str, Any]:
    return {"train": _train(mesh), "resumed": _resumed(mesh)}


def _reference(dp: int, ns_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Train whole matrices in one process: torch.optim.Muon's own step where it iterates in that type, or its formula."""
    whole = {name: nn.Parameter(value) for name, value in _full(0, None).items()}
    others = [whole[name] for name in SHAPES if name not in MATRICES]
    decays = [whole["table"]]
    adamw = torch.optim.AdamW(
        [{"params": decays, "weight_decay": DECAY}, {"params": [whole["norm"]], "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
    )
    assert len(others) == 2
    muon = torch.optim.Muon(
        [whole[name] for name in MATRICES], lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    momenta = {name: torch.zeros(SHAPES[name]) for name in MATRICES}
    for step in range(STEPS):
        for name, parameter in whole.items():
            parameter.grad = torch.stack([_full(step, rank)[name] for rank in range(dp)]).sum(0)
        nn.utils.clip_grad_norm_(list(whole.values()), CLIP)
        adamw.step()
        if ns_dtype == torch.bfloat16:
            muon.step()
            continue
        for name, momentum in momenta.items():
            gradient = whole[name].grad
            momentum.mul_(0.95).add_(gradient, alpha=0.05)
            direction = 0.05 * gradient + 0.95 * momentum
            update = orthogonalize(direction.double(), torch.float64) * 0.2 * max(SHAPES[name]) ** 0.5
            whole[name].data = (1 - RATE * DECAY) * whole[name].data - RATE * update.float()
    return {name: parameter.detach() for name, parameter in whole.items()}


@functools.cache
def _results(layout: Layout) -> list[dict[str, Any]]:
    return run_layout(layout, _all) if layout.world_size > 1 else [_all(toys.alone())]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=2),
        Layout(dp=3),
        Layout(tp=2, dp=2),
        pytest.param(Layout(tp=2, dp=4), marks=pytest.mark.slow),
    ],
    ids=lambda layout: f"tp{layout.tp}-dp{layout.dp}",
)
def test_whole_matrices_are_updated_as_by_one_process_in_every_sharding(layout: Layout) -> None:
    references = {dtype: _reference(layout.dp, dtype) for dtype in (torch.float32, torch.bfloat16)}
    for rank, results in enumerate(_results(layout)):
        mesh = Mesh(layout, rank, torch.device("meta"))
        assert results["resumed"]
        for case, found in results["train"].items():
            dtype = case[2]
            for name in SHAPES:
                right = _slice(_facts(name, mesh), references[dtype][name])
                if dtype == torch.float32:
                    torch.testing.assert_close(found[name], right, rtol=1e-5, atol=1e-6, msg=f"{case} {name}")
                else:  # bf16 weights see the update of torch's iterations in bf16 up to their own precision
                    torch.testing.assert_close(found[name].float(), right, rtol=2e-2, atol=2e-2, msg=f"{case} {name}")


def test_the_iterations_in_bf16_are_those_of_torch() -> None:
    for shape in ((12, 7), (5, 24), (9, 9)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = matrix
        torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
        ours = orthogonalize(matrix, torch.bfloat16).float() * 0.2 * max(shape) ** 0.5
        torch.testing.assert_close(-parameter.detach(), ours, rtol=1e-6, atol=1e-6)


def test_singular_values_come_near_one_and_directions_stay() -> None:
    matrix = torch.randn(20, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = orthogonalize(matrix, torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.t() @ found @ right.t()
    values = inner.diagonal()
    assert (values > 0.6).all() and (values < 1.3).all()
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-9)
    assert orthogonalize(torch.zeros(3, 4), torch.float32).abs().max() == 0


def test_tables_norms_and_biases_are_left_to_adamw() -> None:
    assert is_for_muon(ParameterFacts((4, 4)))
    assert not is_for_muon(ParameterFacts((4, 4), is_table=True))
    assert not is_for_muon(ParameterFacts((4,), decays=False))
    assert not is_for_muon(ParameterFacts((4, 4, 4)))


def test_the_work_is_shared_among_those_who_keep_a_part_the_largest_first() -> None:
    def row(name: str, rows: int, ranges: list[list[int]]) -> tuple:
        return describe(name, ParameterFacts((rows, 8)), (rows, 8), ranges)

    everyone = [[row("a", 8, [[0, 64]]), row("b", 8, [[0, 64]]), row("c", 4, [[0, 32]])] for _ in range(2)]
    matrices = {matrix.name: matrix for matrix in plan_matrices(everyone)}
    assert (matrices["a"].owner, matrices["b"].owner, matrices["c"].owner) == (0, 1, 0)
    assert matrices["b"].pieces[0].ranks == (0, 1) and matrices["b"].source(matrices["b"].pieces[0]) == 1
    assert plan_matrices([[row("empty", 0, [])]]) == []
    halves = plan_matrices([[row("a", 8, [[0, 32]])], [row("a", 8, [])], [row("a", 8, [[32, 64]])]])
    assert halves[0].owner == 0 and [piece.ranks for piece in halves[0].pieces] == [(0,), (2,)]

"""One gradient norm for the whole model, each parameter counted once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from parallax.collectives import all_reduce_
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.norm import clip_coefficient, local_squared_norm, squared_norm
from parallax.data_parallel.options import ZERO_STAGES
from parallax.mesh import Layout, Mesh, Replicas
from parallax.tensor_parallel.facts import ParameterFacts
from tests.data_parallel import toys
from tests.distributed.harness import run_layout


def _total_norm(buckets: GradientBuckets, mesh: Mesh) -> torch.Tensor:
    return all_reduce_(local_squared_norm(buckets), mesh.world).sqrt()


def _stage_norms(mesh: Mesh) -> tuple[float, float]:
    parameters = toys.given({f"stage{mesh.pp_rank}": torch.zeros(9)})
    buckets = GradientBuckets(parameters, mesh)
    # Nine elements of 1 have norm 3; those of the second stage have norm 4.
    toys.backward_of(parameters, {f"stage{mesh.pp_rank}": torch.full((9,), (3.0 + mesh.pp_rank) / 3)})
    buckets.finish()
    total = _total_norm(buckets, mesh)
    return total.item(), clip_coefficient(total, 1.0).item()


def test_stages_are_clipped_by_one_factor_from_the_norm_of_the_whole_model() -> None:
    for total, coefficient in run_layout(Layout(pp=2), _stage_norms):
        assert total == pytest.approx(5.0, rel=1e-7)
        assert coefficient == pytest.approx(0.2, rel=1e-7)


def _copies(mesh: Mesh) -> list[float]:
    totals = []
    for zero in ZERO_STAGES:
        parameters = [
            ("sharded", nn.Parameter(torch.zeros(40)), ParameterFacts((80,))),
            ("replicated", nn.Parameter(torch.zeros(40)), ParameterFacts((40,), replicas=Replicas(tp=2))),
        ]
        buckets = GradientBuckets(parameters, mesh, zero=zero)
        toys.backward_of(parameters, {name: torch.linspace(0, 1, 40) for name, _, _ in parameters})
        buckets.finish()
        toys.poison(buckets)
        totals.append(_total_norm(buckets, mesh).item())
    return totals


def test_a_parameter_that_tp_ranks_hold_in_common_counts_once_and_zero_changes_no_bit() -> None:
    right = (3 * torch.linspace(0, 1, 40).double().square().sum()).sqrt().item()
    for totals in run_layout(Layout(tp=2), _copies):
        assert totals[0] == pytest.approx(right, rel=1e-7)
        assert set(totals) == {totals[0]}


def test_the_norm_of_a_large_bucket_is_right_where_an_fp32_sum_is_not() -> None:
    size = 2_000_003
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)) + 0.1
    parameters = toys.given({"weight": torch.zeros(size)})
    buckets = GradientBuckets(parameters, toys.alone())
    toys.backward_of(parameters, {"weight": gradient})
    buckets.finish()
    assert local_squared_norm(buckets).item() == pytest.approx(gradient.double().square().sum().item(), rel=1e-7)


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [(5.0, 1.0, 0.2), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (5.0, 0.0, 1.0), (1e300, 1.0, 1e-300)],
)
def test_gradients_are_scaled_down_to_the_limit_and_never_up(norm: float, limit: float, factor: float) -> None:
    assert clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit).item() == pytest.approx(factor)


def test_where_slices_end_shows_in_no_bit_that_fp32_has() -> None:
    """The sum of a million squares of random numbers is exact to float64's rounding, however it is cut."""
    gradient = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    exact = math.fsum(value * value for value in gradient.double().tolist())
    for pieces in (1, 2, 7):
        total = sum(squared_norm(piece) for piece in gradient.chunk(pieces))
        assert abs(float(total) - exact) < 1e-12 * exact

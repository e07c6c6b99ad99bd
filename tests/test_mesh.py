"""Ranks and their positions."""

import pytest

from parallax.mesh import Layout, Replicas, plan_mesh


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=3, dp=4), Layout(tp=8, pp=16, dp=128)])
def test_position_and_global_rank_are_inverse_and_tp_varies_fastest(layout: Layout) -> None:
    for rank in range(0, layout.world_size, max(1, layout.world_size // 97)):
        assert layout.global_rank(**layout.coordinates(rank)) == rank
    if layout.tp > 1:
        assert layout.coordinates(1) == {"pp": 0, "dp": 0, "tp": 1}


def test_axes_partition_the_world() -> None:
    layout = Layout(tp=2, pp=2, dp=3)
    for axes in (["tp"], ["pp"], ["dp"], ["tp", "dp"], ["pp", "tp"]):
        groups = {layout.ranks_along(axes, rank) for rank in range(layout.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))


def test_holders_of_shared_kv_heads_and_of_tied_embeddings() -> None:
    layout = Layout(tp=4, pp=2, dp=2)
    assert Replicas(tp=2).ranks(layout, 2) == (2, 3, 6, 7)
    assert Replicas(stages=(0, 1)).ranks(layout, 1) == (1, 5, 9, 13)
    assert Replicas(tp=4).ranks(layout, 8) == tuple(range(8, 16))


def test_a_plan_of_sixteen_thousand_ranks_needs_no_processes() -> None:
    mesh = plan_mesh(Layout(tp=8, pp=16, dp=128), 12345)
    assert mesh.tp is not None and mesh.tp.size == 8 and mesh.tp.ranks[mesh.tp.rank] == 12345

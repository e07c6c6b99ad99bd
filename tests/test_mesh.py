"""Ranks and their positions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.mesh import Layout, Replicas, plan_mesh

ROOT = Path(__file__).parents[1]


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


def test_another_number_of_processes_than_the_layout_has_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(
        "from parallax.mesh import Layout, connect\nwith connect(Layout(pp=4)) as mesh:\n    print('no')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    for world_size, said in (("1", "1 was started"), ("2", "2 were started")):
        ended = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            env=environment | {"RANK": "0", "WORLD_SIZE": world_size, "PYTHONPATH": str(ROOT)},
        )
        assert (ended.returncode, ended.stdout) == (2, "") and ended.stderr.count("\n") == 1, ended.stderr
        assert ended.stderr.startswith("example.py: error: ") and f"needs 4 processes, and {said}" in ended.stderr
        assert "torchrun --nproc-per-node 4" in ended.stderr

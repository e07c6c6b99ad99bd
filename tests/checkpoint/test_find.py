"""The newest good checkpoint is found by looking, whatever else lies in the folder."""

from pathlib import Path

from parallax.checkpoint.find import find_latest, list_checkpoints
from parallax.checkpoint.save import save
from parallax.mesh import Mesh
from tests.checkpoint.runs import LLAMA, build_parts, single_process_mesh
from tests.distributed.harness import run_ranks


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None


def test_the_newest_complete_checkpoint_is_found_among_leftovers(tmp_path: Path) -> None:
    mesh = single_process_mesh()
    parts = build_parts(mesh, LLAMA, zero=0, seed=1)
    first, second = save(tmp_path, 9, parts, mesh), save(tmp_path, 100_000_010, parts, mesh)
    for name in ("step-00000200.partial", "step-00000300", "step-5", "latest", "step-000000400"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000500").write_text("a file")
    (tmp_path / "latest.txt").write_text("step-00000300")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [100_000_010, 300, 9]
    assert find_latest(tmp_path) == second
    assert find_latest(tmp_path, older_than=100_000_010) == first
    assert find_latest(tmp_path, older_than=9) is None
    (second / "manifest.json").unlink()
    assert find_latest(tmp_path) == first
    first.rename(tmp_path / "step-00000010")  # then the name says what the manifest does not
    assert find_latest(tmp_path) is None


def _find(mesh: Mesh, root: Path) -> str:
    return str(find_latest(root, mesh))


def test_all_ranks_find_the_same(tmp_path: Path) -> None:
    mesh = single_process_mesh()
    path = save(tmp_path, 7, build_parts(mesh, LLAMA, zero=0, seed=1), mesh)
    assert run_ranks(2, _find, tmp_path) == [str(path)] * 2

"""What newer checkpoints replace goes, and never before; what dead saves left goes; nothing else does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from parallax.checkpoint import place
from parallax.checkpoint.find import find_latest
from parallax.checkpoint.names import step_name
from parallax.checkpoint.place import remove as remove_checkpoint
from parallax.checkpoint.place import remove_leftovers
from parallax.checkpoint.retention import replaced_checkpoints
from parallax.checkpoint.save import save
from tests.checkpoint.runs import LLAMA, build_parts, single_process_mesh

MESH = single_process_mesh()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has saved steps 1 to 6."""
    root = tmp_path_factory.mktemp("run")
    parts = build_parts(MESH, LLAMA, zero=0, seed=1)
    parts.optimizer = None
    for step in range(1, 7):
        save(root, step, parts, MESH)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def steps(paths: list[Path]) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in paths]


@pytest.mark.parametrize(
    ("keep", "keep_every", "gone"),
    [(0, 0, []), (1, 0, [1, 2, 3, 4, 5]), (2, 0, [1, 2, 3, 4]), (9, 0, []), (1, 2, [1, 3, 5]), (2, 3, [1, 2, 4])],
)
def test_the_newest_and_every_nth_stay(keep: int, keep_every: int, gone: list[int], saved: Path) -> None:
    assert steps(replaced_checkpoints(saved, keep, keep_every, newest_step=6)) == gone


def test_a_damaged_checkpoint_neither_counts_nor_goes(root: Path) -> None:
    for step, victim in ((6, "manifest.json"), (4, "model/config.json"), (2, "state.json")):
        (root / step_name(step) / victim).write_text("")
    assert steps(replaced_checkpoints(root, 2, 0, newest_step=6)) == [1]


def test_what_is_newer_than_the_one_just_saved_is_not_touched(root: Path) -> None:
    assert steps(replaced_checkpoints(root, 1, 0, newest_step=3)) == [1, 2]


def test_a_removal_cut_short_leaves_nothing_that_is_taken_for_a_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise OSError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(place.shutil, "rmtree", cut)
        with pytest.raises(OSError):
            remove_checkpoint(root / step_name(6))
    assert find_latest(root) == root / step_name(5)
    remove_leftovers(root)
    assert sorted(path.name for path in root.iterdir()) == [step_name(step) for step in range(1, 6)]


def test_only_leftovers_of_saves_are_removed_and_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    (root / "step-00000009.partial").symlink_to(outside)
    (root / "step-00000008.partial" / "model").mkdir(parents=True)
    (root / "step-00000008.partial" / "model" / "link").symlink_to(outside)
    (root / "step-00000007.replaced.partial").mkdir()
    (root / "step-notes.partial").mkdir()
    (root / "step-7.partial").mkdir()
    remove_leftovers(root)
    assert (outside / "precious").read_text() == "data"
    left = {path.name for path in root.iterdir()} - {step_name(step) for step in range(1, 7)}
    assert left == {"step-notes.partial", "step-7.partial"}

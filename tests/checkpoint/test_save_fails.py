"""A save that cannot be finished ends in the same error on every rank and leaves nothing; one that is killed, nothing
that is taken for a checkpoint."""

import errno
import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from parallax.checkpoint.files import HashingFile
from parallax.checkpoint.find import find_latest
from parallax.checkpoint.load import load
from parallax.checkpoint.save import save
from parallax.checkpoint.verify import verify
from parallax.collectives import barrier
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from tests.checkpoint.runs import LLAMA, build_parts, differences, single_process_mesh
from tests.distributed.harness import run_layout


def _said(mesh: Mesh, root: Path, parts: object) -> str:
    try:
        save(root, 100, parts, mesh)  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return ""


def _save_with_a_full_disk(mesh: Mesh, root: Path, failing: int, limit: int) -> list[str]:
    """Save while one rank may write no file of more than `limit` bytes, then without that limit."""
    parts = build_parts(mesh, LLAMA, zero=1, seed=1, fill=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    first = _said(mesh, root, parts)
    left = sorted(path.name for path in root.iterdir()) if root.exists() else []
    barrier(mesh.world)
    if mesh.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return [first, str(left), _said(mesh, root, parts)]


@pytest.mark.parametrize(
    ("failing", "limit"), [(0, 100), (0, 40_000), (1, 20_000)], ids=["first file", "a file of tensors", "another rank"]
)
def test_a_full_disk_on_one_rank_is_the_same_error_on_all_and_leaves_nothing(
    failing: int, limit: int, tmp_path: Path
) -> None:
    results = run_layout(Layout(dp=2), _save_with_a_full_disk, tmp_path / "run", failing, limit)
    assert results[0] == results[1]
    failed, left, succeeded = results[0]
    assert f"rank {failing} cannot write the checkpoint" in failed and "\n" not in failed
    assert "File too large" in failed and "--out" in failed
    assert left == "[]" and succeeded == ""
    assert verify(tmp_path / "run" / "step-00000100") == []


def _save_somewhere(mesh: Mesh, root: Path) -> str:
    return _said(mesh, root, build_parts(mesh, LLAMA, zero=1, seed=1))


def test_a_folder_that_cannot_be_made_is_the_same_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = run_layout(Layout(dp=2), _save_somewhere, tmp_path / "file")
    assert first == second and "rank 0 cannot write the checkpoint" in first


def _die_while_saving(mesh: Mesh, root: Path) -> None:
    parts = build_parts(mesh, LLAMA, zero=1, seed=1, fill=True)
    save(root, 50, parts, mesh)
    if mesh.rank == 1:
        HashingFile.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    save(root, 100, parts, mesh)


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before_as_the_latest(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_layout(Layout(dp=2), _die_while_saving, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000050", "step-00000100.partial"]
    latest = find_latest(tmp_path)
    assert latest == tmp_path / "step-00000050"
    mesh = single_process_mesh()
    parts = build_parts(mesh, LLAMA, zero=0, seed=2)
    load(latest, parts, mesh)
    assert differences(parts, seed=1) == []
    save(tmp_path, 150, parts, mesh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000050", "step-00000150"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    mesh = single_process_mesh()
    for seed in (1, 2):
        path = save(tmp_path, 100, build_parts(mesh, LLAMA, zero=0, seed=seed, fill=True), mesh)
    parts = build_parts(mesh, LLAMA, zero=0, seed=3)
    load(path, parts, mesh)
    assert differences(parts, seed=2) == [] and [path] == list(tmp_path.iterdir())


def test_saving_copies_values_and_does_not_hold_on_to_them(tmp_path: Path) -> None:
    mesh = single_process_mesh()
    parts = build_parts(mesh, LLAMA, zero=0, seed=1, fill=True)
    path = save(tmp_path, 100, parts, mesh)
    for _, parameter, _ in parts.parameters:
        parameter.data.zero_()
    load(path, parts, mesh)
    assert differences(parts, seed=1) == []


def test_a_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    mesh = single_process_mesh()
    parts = build_parts(mesh, LLAMA, zero=0, seed=1)
    parts.state = {"path": tmp_path}
    with pytest.raises(TypeError):
        save(tmp_path, 100, parts, mesh)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_while_it_takes_a_file_in_the_background_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems tell of a full disk only then, and only once. The thread that syncs files of tensors must be heard."""
    plain, failed = os.fsync, []

    def fails(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread() and descriptor not in failed:
            failed.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(descriptor)

    mesh = single_process_mesh()
    parts = build_parts(mesh, LLAMA, zero=1, seed=1, fill=True)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ConfigError, match=r"cannot write the checkpoint .*No space left on device"):
        save(str(tmp_path / "run"), 100, parts, mesh)
    assert failed and list((tmp_path / "run").iterdir()) == []
    monkeypatch.undo()
    save(str(tmp_path / "run"), 100, parts, mesh)
    assert verify(tmp_path / "run" / "step-00000100") == []


def test_a_thread_that_cannot_be_started_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = single_process_mesh()
    parts = build_parts(mesh, LLAMA, zero=1, seed=1, fill=True)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ConfigError, match=r"cannot write the checkpoint .*can't start new thread"):
        save(str(tmp_path / "run"), 100, parts, mesh)
    assert list((tmp_path / "run").iterdir()) == []

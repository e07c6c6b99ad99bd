"""A save in the background writes what was there at the call, the same bytes as any other save, while the ranks go on."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
import torch

from parallax.checkpoint import files
from parallax.checkpoint.background import BackgroundSaver
from parallax.checkpoint.manifest import read_manifest
from parallax.checkpoint.save import save
from parallax.checkpoint.verify import verify
from parallax.collectives import all_reduce_, barrier
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from tests.checkpoint.runs import GPT2, LLAMA, build_parts, contents
from tests.distributed.harness import run_layout


def _save_and_spoil(mesh: Mesh, root: Path) -> list[int]:
    """Save twice in the background, changing everything as soon as each call returns; once more in the foreground."""
    parts = build_parts(mesh, GPT2, zero=1, seed=1, dtype=torch.bfloat16, fill=True)
    save(root / "foreground", 100, parts, mesh)
    saver = BackgroundSaver(root / "background", parts, mesh)
    assert parts.optimizer is not None
    kept = [tensor.clone() for tensor in _tensors(parts)]
    for step in (100, 200):
        saver.save(step)
        for tensor in _tensors(parts):
            tensor.fill_(7)
        parts.optimizer.step_count += 1
        parts.state["tokens"] = 0
        for _ in range(20):  # as training would, over the same ranks
            all_reduce_(torch.ones(100), mesh.world)
        saver.wait()
        for tensor, value in zip(_tensors(parts), kept, strict=True):
            tensor.copy_(value)
        parts.optimizer.step_count -= 1
        parts.state["tokens"] = 1 << 40
    return [saver.peak_bytes, threading.active_count()]


def _tensors(parts: object) -> list[torch.Tensor]:
    tensors = [parameter.detach() for _, parameter, _ in parts.parameters]  # type: ignore[attr-defined]
    for name, _, _ in parts.parameters:  # type: ignore[attr-defined]
        tensors += [tensor for piece in parts.optimizer.pieces(name) for tensor in piece.tensors.values()]  # type: ignore[attr-defined]
    return tensors


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(tp=2), Layout(pp=2)], ids=str)
def test_what_is_written_is_what_was_there_at_the_call(layout: Layout, tmp_path: Path) -> None:
    results = run_layout(layout, _save_and_spoil, tmp_path)
    assert all(peak == results[0][0] for peak, _ in results)
    expected = contents(tmp_path / "foreground" / "step-00000100")
    first = contents(tmp_path / "background" / "step-00000100")
    second = contents(tmp_path / "background" / "step-00000200")
    assert first == expected
    del expected["state.json"], expected["manifest.json"], second["state.json"], second["manifest.json"]
    assert second == expected
    assert verify(tmp_path / "background" / "step-00000200") == []


def _copied(mesh: Mesh, root: Path) -> int:
    return BackgroundSaver(root, build_parts(mesh, LLAMA, zero=0, seed=1), mesh)._copy.num_bytes


def test_replicas_share_the_copy_as_they_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = run_layout(Layout(), _copied, tmp_path)
    halves = run_layout(Layout(dp=2), _copied, tmp_path)
    assert sum(halves) == whole and max(halves) < whole


def _fail(mesh: Mesh, root: Path, failing: int) -> list[str]:
    saver = BackgroundSaver(root, build_parts(mesh, LLAMA, zero=1, seed=1), mesh)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    saver.save(100)
    said = []
    try:
        saver.wait()
    except ConfigError as error:
        said.append(str(error))
    said.append(str(sorted(path.name for path in root.iterdir())))
    barrier(mesh.world)
    if mesh.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    saver.save(200)
    saver.wait()
    return said


def test_what_goes_wrong_is_raised_on_all_ranks_by_the_next_call_and_a_later_save_succeeds(tmp_path: Path) -> None:
    first, second = run_layout(Layout(dp=2), _fail, tmp_path, 1)
    assert first == second and len(first) == 2 and first[1] == "[]"
    assert "rank 1 cannot write the checkpoint" in first[0] and "File too large" in first[0]
    assert verify(tmp_path / "step-00000200") == []


def _save_often(mesh: Mesh, root: Path) -> list:
    plain, may_finish = files.HashingFile.finish, threading.Event()

    def slow(self: files.HashingFile) -> object:
        assert may_finish.wait(60)
        return plain(self)

    files.HashingFile.finish = slow  # type: ignore[method-assign]
    complete: list[int] = []
    saver = BackgroundSaver(root, build_parts(mesh, LLAMA, zero=1, seed=1), mesh, after=complete.append)
    saver.save(1)  # returns though no file can be finished
    busy = saver.is_busy
    may_finish.set()
    saver.save(2)
    seen = list(complete)
    saver.wait()
    return [busy, seen, complete, saver.is_busy]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    first, second = run_layout(Layout(dp=2), _save_often, tmp_path)
    assert first == [True, [1], [1, 2], False] and second == [True, [], [], False]
    assert [read_manifest(path).step for path in sorted(tmp_path.iterdir())] == [1, 2]

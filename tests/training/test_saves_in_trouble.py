"""What happens to a run while it saves: a second signal, a full disk, a folder that is in the way, damage on the way back."""

from __future__ import annotations

import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from parallax.checkpoint.files import HashingFile
from parallax.checkpoint.find import find_latest
from parallax.data.loader import BatchLoader
from parallax.mesh import Layout, Mesh
from tests.distributed.harness import run_layout
from tests.training.processes import Job
from tests.training.runs import before_data, contents, metrics, run, saved, scale_loss_at, write_text

ALWAYS = "--eval-every 0 --lr-decay-steps 6 --warmup-steps 1"


def _slow_save(rank: int, seconds: float) -> None:
    """Have each file of tensors take its time before it is on the disk."""
    finish = HashingFile.finish

    def slow(self: HashingFile):  # type: ignore[no-untyped-def]
        print("a file is being written", flush=True)
        time.sleep(seconds)
        return finish(self)

    HashingFile.finish = slow  # type: ignore[method-assign]


def _wait_for(job: Job, rank: int, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in job.output(rank):
        assert time.monotonic() < deadline, job.output(rank)
        time.sleep(0.05)


@pytest.mark.parametrize("option", ["", "--sync-save"], ids=["background", "sync"])
def test_a_second_signal_during_a_save_exits_at_once_and_the_half_is_no_checkpoint(option: str, tmp_path: Path) -> None:
    command = f"{ALWAYS} --out {tmp_path}/run {option}"
    with Job(1, f"{command} --steps 2", tmp_path) as job:
        assert job.wait() == [0]
    with Job(1, f"{command} --steps 6 --save-every 1", tmp_path, partial(_slow_save, seconds=60.0)) as job:
        _wait_for(job, 0, "a file is being written")
        job.kill(0, signal.SIGTERM)
        _wait_for(job, 0, "a second signal exits at once")
        started = time.monotonic()
        job.kill(0, signal.SIGTERM)
        assert job.wait(20) == [143] and time.monotonic() - started < 10
    assert saved(tmp_path / "run") == ["step-00000002", "step-00000003.partial"]
    found = find_latest(tmp_path / "run" / "checkpoints")
    assert found is not None and found.name == "step-00000002"
    with Job(1, f"{command} --steps 6", tmp_path) as job:
        assert job.wait() == [0] and "going on from" in job.output(0)
    assert saved(tmp_path / "run") == ["step-00000002", "step-00000006"]
    with Job(1, f"{ALWAYS} --out {tmp_path}/whole --steps 6", tmp_path) as job:
        assert job.wait() == [0]
    last = "checkpoints/step-00000006"
    assert contents(tmp_path / "run" / last) == contents(tmp_path / "whole" / last)


def _wait_in_step_two(rank: int, go: Path) -> None:
    def action(loader: BatchLoader, step: int) -> None:
        if step == 1:
            print("step 2 begins", flush=True)
            while not go.exists():
                time.sleep(0.05)

    before_data(action)


def test_a_run_whose_launcher_has_ended_saves_all_the_same(tmp_path: Path) -> None:
    command = f"{ALWAYS} --out {tmp_path}/run --steps 4"  # the first save is that of the last step
    with Job(2, command, tmp_path, partial(_wait_in_step_two, go=tmp_path / "go")) as job:
        _wait_for(job, 0, "step 2 begins")
        job.end_launcher()
        _wait_for(job, 0, "the launcher has ended; training goes on")
        time.sleep(3)  # for more attempts to reach it
        (tmp_path / "go").touch()
        assert job.wait() == [0, 0]
        said = job.output(0) + job.output(1)
        assert said.count("the launcher has ended") == 1 and said.count("Broken pipe") <= 2, said
    assert saved(tmp_path / "run") == ["step-00000004"]


def _full_disk(rank: int, failing: int) -> None:
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))


def _full_disk_for_two_steps(rank: int, out: Path) -> None:
    """Have metrics.jsonl be on a full disk while steps 2 and 3 are told."""
    path, aside = out / "metrics.jsonl", out / "aside"

    def action(loader: BatchLoader, step: int) -> None:
        if rank == 0 and step == 1:
            path.rename(aside)
            path.symlink_to("/dev/full")
        if rank == 0 and step == 3:
            path.unlink()
            aside.rename(path)

    before_data(action)


def test_a_full_disk_under_the_metrics_costs_no_run_and_no_line(tmp_path: Path) -> None:
    trouble = partial(_full_disk_for_two_steps, out=tmp_path / "run")
    with Job(2, f"{ALWAYS} --out {tmp_path}/run --steps 4 --log-every 1", tmp_path, trouble) as job:
        assert job.wait() == [0, 0]
        assert job.output(0).count("metrics.jsonl cannot be written (No space left on device)") == 1
        assert "metrics.jsonl is complete again" in job.output(0)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("option", ["", "--sync-save"], ids=["background", "sync"])
def test_a_full_disk_ends_the_run_with_one_sentence_and_nothing_is_left(option: str, tmp_path: Path) -> None:
    command = f"{ALWAYS} --out {tmp_path}/run --steps 6 --save-every 2 {option}"
    # From here on the tokens are in the cache.
    with Job(1, f"{ALWAYS} --out {tmp_path}/first --steps 1", tmp_path) as job:
        assert job.wait() == [0]
    with Job(2, command, tmp_path, partial(_full_disk, failing=1)) as job:
        job.processes[0].join(60)
        assert job.processes[0].exitcode == 2
        assert job.output(0).count("error: rank 1 cannot write the checkpoint") == 1 and "File too large" in job.output(
            0
        )
        assert "Traceback" not in job.output(0) + job.output(1)
    assert saved(tmp_path / "run") == []
    with Job(2, command, tmp_path) as job:
        assert job.wait() == [0, 0]


def _file_in_the_way(rank: int, path: Path) -> None:
    before_data(lambda loader, step: path.touch())


def test_a_folder_that_cannot_be_made_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    trouble = partial(_file_in_the_way, path=tmp_path / "run" / "checkpoints")
    with Job(1, f"{ALWAYS} --out {tmp_path}/run --steps 2", tmp_path, trouble) as job:
        assert job.wait() == [2]
        (line,) = [line for line in job.output(0).splitlines() if "error" in line]
        assert "cannot write the checkpoint" in line and "--out" in line
        assert "Traceback" not in job.output(0)


def _bad_step_and_damage(mesh: Mesh, folder: str, damaged: list[int]) -> None:
    """Make step 5 a bad one, and damage checkpoints before it is gone back to."""
    from parallax.training.checkpoints import Checkpoints

    scale_loss_at(mesh, (4,), float("nan"), 0)
    restore = Checkpoints.restore

    def damage_first(self: Checkpoints):  # type: ignore[no-untyped-def]
        for step in damaged if mesh.rank == 0 else ():
            path = next((Path(folder) / "run" / "checkpoints" / f"step-0000000{step}" / "optimizer").iterdir())
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        return restore(self)

    Checkpoints.restore = damage_first  # type: ignore[method-assign]


@pytest.mark.parametrize(("damaged", "ends"), [([4], False), ([2, 4], True)], ids=["the newest", "all"])
def test_a_rollback_passes_over_damage_and_ends_the_run_where_there_is_nothing_else(
    damaged: list[int], ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path)
    command = f"{ALWAYS} --out {tmp_path}/run --steps 6 --save-every 2 --on-bad-step rollback"
    trouble = partial(_bad_step_and_damage, folder=str(tmp_path), damaged=damaged)
    found = run_layout(Layout(dp=2), run, [command], str(tmp_path), trouble)
    assert found[0] == found[1]
    if ends:
        assert "is damaged" in found[0][0][0] and "there is no checkpoint before it to go back to" in found[0][0][0]
    else:
        assert found[0] == [[]] and "step-00000006" in saved(tmp_path / "run")

"""kill -9 of any rank at any moment, during a save too: the next start goes on, and ends with the very bits of an unbroken run."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from parallax.checkpoint.files import HashingFile
from parallax.checkpoint.find import list_checkpoints
from parallax.checkpoint.verify import verify
from parallax.errors import EXIT_LOST_RANK
from tests.training.processes import Job
from tests.training.runs import contents, metrics, saved

STEPS = 40
ALWAYS = f"--steps {STEPS} --eval-every 0 --warmup-steps 2 --save-every 2 --keep 2 --timeout 30"


def _slow_saves(rank: int) -> None:
    """Make each file of a save take a while to reach the disk, so that a kill often comes in the middle of one."""
    plain = HashingFile.finish

    def finish(self: HashingFile) -> object:
        time.sleep(0.03)
        return plain(self)

    HashingFile.finish = finish  # type: ignore[method-assign]


def _newest(out: Path) -> int:
    return max((step for step, _ in list_checkpoints(out / "checkpoints")), default=0)


def _wait_for_the_moment(job: Job, out: Path, chance: random.Random) -> str:
    """Return when a few more checkpoints are there and, half of the time, another one is just being written."""
    target = _newest(out) + 2 * chance.randrange(1, 3)
    during_a_save = chance.random() < 0.5
    deadline = time.monotonic() + 60
    while _newest(out) < min(target, STEPS - 10):
        assert time.monotonic() < deadline and all(process.is_alive() for process in job.processes), job.output(0)
        time.sleep(0.005)
    while during_a_save and not list((out / "checkpoints").glob("step-*.partial")):
        assert time.monotonic() < deadline
    time.sleep(chance.random() * 0.03)
    return "during a save" if during_a_save else "between saves"


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("options", ["", pytest.param("--pp 2 --schedule dualpipe", marks=pytest.mark.slow)])
def test_five_kills_lose_nothing(options: str, tmp_path: Path) -> None:
    chance = random.Random(7)
    before, out = _shared_memory(), tmp_path / "run"
    with Job(2, f"{ALWAYS} {options} --out {tmp_path}/whole", tmp_path) as job:
        assert job.wait() == [0, 0], job.output(0)
    moments = []
    for kill in range(5):
        with Job(2, f"{ALWAYS} {options} --out {out}", tmp_path, _slow_saves) as job:
            moments.append(_wait_for_the_moment(job, out, chance))
            victim = chance.randrange(2)
            assert job.kill(victim)
            if kill == 0:  # the other one ends by itself; later it is ended as by a launcher, which is sooner
                statuses = job.wait(30)
                assert statuses[1 - victim] == EXIT_LOST_RANK, job.output(1 - victim)
    assert len(set(moments)) == 2, moments
    with Job(2, f"{ALWAYS} {options} --out {out}", tmp_path) as job:
        assert job.wait() == [0, 0], job.output(0)
        assert "going on from" in job.output(0)
    assert saved(out) == saved(tmp_path / "whole") == [f"step-{step:08d}" for step in (STEPS - 2, STEPS)]
    last = f"checkpoints/step-{STEPS:08d}"
    assert contents(out / last) == contents(tmp_path / "whole" / last)
    assert verify(out / last) == []
    assert [row["step"] for row in metrics(out)] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in metrics(out)] == [row["loss"] for row in metrics(tmp_path / "whole")]
    assert _shared_memory() == before

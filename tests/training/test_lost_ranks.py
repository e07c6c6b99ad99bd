"""When a rank ends or stands still the others stop soon, and one of them says which rank, in which step, and where all were."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from parallax.errors import EXIT_LOST_RANK
from parallax.training.watch import Post, describe
from tests.training.processes import Job
from tests.training.runs import before_data

ALWAYS = "--steps 50 --eval-every 0 --lr-decay-steps 50 --log-every 1"


def _at_step(rank: int, guilty: int, step: int, number: int | None, seconds: float = 0.0) -> None:
    """Have the guilty rank signal itself, or wait, at a step counted from 0."""

    def action(_: object, now: int) -> None:
        if rank == guilty and now == step:
            if number is not None:
                os.kill(os.getpid(), number)
            time.sleep(seconds)

    before_data(action)


def _messages(job: Job) -> list[str]:
    """Return what was told, over all ranks."""
    return [
        line for rank in range(len(job.processes)) for line in job.output(rank).splitlines() if "all ranks stop" in line
    ]


def _no_tracebacks(job: Job) -> bool:
    return not any("Traceback" in job.output(rank) for rank in range(len(job.processes)))


@pytest.mark.parametrize("options", ["", "--pp 2", "--tp 2"], ids=["dp 2", "pp 2", "tp 2"])
def test_a_rank_that_is_killed_ends_all_with_one_message(options: str, tmp_path: Path) -> None:
    trouble = partial(_at_step, guilty=1, step=2, number=signal.SIGKILL)
    with Job(2, f"{ALWAYS} {options} --out {tmp_path}/run --timeout 20", tmp_path, trouble) as job:
        started = time.monotonic()
        assert job.wait(40) == [EXIT_LOST_RANK, -signal.SIGKILL]
        assert time.monotonic() - started < 30
        (message,) = _messages(job)
        assert message.startswith("parallax: rank 1 ended, or its process stands still in step ")
        assert re.search(r"rank 0: step 3, .* over (dp|pp|tp|world)", job.output(0)), job.output(0)
        assert _no_tracebacks(job)


def test_a_rank_that_stands_still_is_named_within_the_timeout(tmp_path: Path) -> None:
    trouble = partial(_at_step, guilty=2, step=2, number=None, seconds=60.0)
    with Job(4, f"{ALWAYS} --tp 2 --pp 2 --out {tmp_path}/run --timeout 6", tmp_path, trouble) as job:
        assert job.wait(40) == [EXIT_LOST_RANK] * 4
        (message,) = _messages(job)
        assert re.match(r"parallax: rank 2 did not go on for \d+ s in step 3; all ranks stop", message), message
        assert _no_tracebacks(job)


@pytest.mark.parametrize("options", ["", "--pp 2", "--tp 2"], ids=["dp 2", "pp 2", "tp 2"])
def test_a_process_that_is_stopped_ends_the_others(options: str, tmp_path: Path) -> None:
    trouble = partial(_at_step, guilty=0, step=2, number=signal.SIGSTOP)
    with Job(2, f"{ALWAYS} {options} --out {tmp_path}/run --timeout 5", tmp_path, trouble) as job:
        job.processes[1].join(30)
        assert job.processes[1].exitcode == EXIT_LOST_RANK
        assert "parallax: rank 0 ended, or its process stands still in step 3" in job.output(1)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("--lr 0.5", "rank 1 has --lr 0.5, rank 0 has 0.001"),
        ("--tp 2", "rank 1 has --tp 2, rank 0 has 1"),
        ("--seed 3", "rank 1 has --seed 3, rank 0 has 0"),
    ],
)
def test_ranks_that_were_asked_for_different_things_are_told_which(other: str, said: str, tmp_path: Path) -> None:
    with Job(2, f"{ALWAYS} --out {tmp_path}/run --timeout 20", tmp_path, others={1: other}) as job:
        job.processes[0].join(40)
        assert job.processes[0].exitcode == 2
        assert said in job.output(0) and "give all ranks the same command" in job.output(0), job.output(0)
        assert _no_tracebacks(job)


def _post(beat: int, doing: str, waiting: bool, since: float) -> Post:
    return Post(beat, "step 7", f"step 7, {doing}", waiting, since)


def test_who_computes_is_to_blame_before_who_waits() -> None:
    before = [
        _post(3, "in all_reduce", True, 90.0),
        _post(3, "2F1", False, 95.0),
        _post(3, "in all_reduce", True, 91.0),
    ]
    after = [Post(post.beat + 3, post.phase, post.doing, post.waiting, post.since) for post in before]
    text = describe(before, after, 100.0, "time")
    assert text.startswith("parallax: rank 1 did not go on for 5 s in step 7; all ranks stop.")
    assert "rank 1: step 7, 2F1, since 5 s\n    rank 0: step 7, in all_reduce, since 10 s" in text


def test_who_gives_no_sign_of_life_is_to_blame_before_all_others() -> None:
    before = [_post(3, "2F1", False, 90.0), _post(3, "in all_reduce", True, 99.0), None]
    after = [_post(6, "2F1", False, 90.0), before[1], None]
    text = describe(before, after, 100.0, "time")
    assert text.startswith("parallax: ranks 1-2 ended, or their processes stand still in step 7")
    assert "rank 2: nothing that it told (no sign of life)" in text


def test_thousands_of_ranks_in_a_few_lines() -> None:
    before = [_post(1, f"in broadcast {rank % 40}", True, 50.0) for rank in range(4000)]
    after = [Post(9, post.phase, post.doing, post.waiting, post.since) for post in before]
    assert len(describe(before, after, 60.0, "time").splitlines()) < 25

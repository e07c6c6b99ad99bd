"""A run that is asked to stop saves within the step, on all ranks alike, and goes on later as if it had not been stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from parallax.mesh import Layout
from parallax.training.signals import StopRequests, decode
from tests.distributed.harness import run_layout
from tests.training.runs import contents, metrics, run, saved, signal_at, write_text

ALWAYS = "--lr-decay-steps 6 --warmup-steps 1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path)
    return tmp_path


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_nothing_is_lost(layout: Layout, folder: Path) -> None:
    always = f"{ALWAYS} --tp {layout.tp} --pp {layout.pp} --eval-every 0"
    last_rank = layout.world_size - 1
    trouble = partial(signal_at, number=signal.SIGTERM, step=2, rank=last_rank)
    stopped = run_layout(layout, run, [f"{always} --out {folder}/parts --steps 6"], str(folder), trouble)
    assert stopped == [stopped[0]] * layout.world_size
    assert stopped[0][0][0].startswith("status 143: signal SIGTERM: step 3 of 6 is saved")
    assert saved(folder / "parts") == ["step-00000003"]
    commands = [f"{always} --out {folder}/parts --steps 6", f"{always} --out {folder}/whole --steps 6"]
    assert run_layout(layout, run, commands, str(folder)) == [[[], []]] * layout.world_size
    last = "checkpoints/step-00000006"
    assert contents(folder / "parts" / last) == contents(folder / "whole" / last)
    for name in ("step", "loss", "grad_norm", "tokens"):
        assert [row[name] for row in metrics(folder / "parts")] == [row[name] for row in metrics(folder / "whole")]


def test_a_signal_during_evaluation_ends_it_and_saves(folder: Path) -> None:
    command = f"{ALWAYS} --out {folder}/run --steps 6 --eval-every 2 --eval-steps 1000"
    trouble = partial(signal_at, number=signal.SIGUSR1, step=1, rank=0, training=False)
    stopped = run_layout(Layout(dp=2), run, [command], str(folder), trouble)
    assert [found[0][0].partition(";")[0] for found in stopped] == [
        "status 138: signal SIGUSR1: step 2 of 6 is saved"
    ] * 2
    assert saved(folder / "run") == ["step-00000002"]
    assert ["eval_loss" in row for row in metrics(folder / "run")] == [False, False]


def test_a_signal_while_a_rank_waits_for_data_is_not_lost(folder: Path) -> None:
    command = f"{ALWAYS} --out {folder}/run --steps 6 --eval-every 0"
    trouble = partial(signal_at, number=signal.SIGTERM, step=1, rank=1, wait=1.0)
    stopped = run_layout(Layout(dp=2), run, [command], str(folder), trouble)
    assert all("status 143: signal SIGTERM: step 2 of 6 is saved" in found[0][0] for found in stopped)
    assert saved(folder / "run") == ["step-00000002"]


def test_a_signal_in_the_last_step_changes_nothing(folder: Path) -> None:
    command = f"{ALWAYS} --out {folder}/run --steps 3 --eval-every 0"
    trouble = partial(signal_at, number=signal.SIGTERM, step=2, rank=0)
    assert run_layout(Layout(), run, [command], str(folder), trouble) == [[[]]]
    assert saved(folder / "run") == ["step-00000003"]


def test_a_run_ends_by_itself_when_its_time_is_up(folder: Path) -> None:
    command = f"{ALWAYS} --out {folder}/run --steps 100000 --eval-every 0 --log-every 0 --exit-after 0.01"
    ((first,), (second,)) = run_layout(Layout(dp=2), run, [command], str(folder))
    assert first == second and first[0].startswith("status 3: --exit-after: step ")
    (name,) = saved(folder / "run")
    assert f"step {int(name.removeprefix('step-'))} of 100000 is saved" in first[0]


BLOCKED_IN_C = """
import ctypes, os, signal
from parallax.training.signals import StopRequests
reading, _ = os.pipe()
with StopRequests() as requests:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.siginterrupt(number, False)  # the kernel takes the reading up again: Python never sees the signal
    print("ready", flush=True)
    ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
"""


def test_a_second_signal_exits_at_once_even_if_the_process_waits_in_c() -> None:
    process = subprocess.Popen([sys.executable, "-c", BLOCKED_IN_C], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGUSR1)
    assert b"a second signal exits at once" in process.stderr.readline()
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143 and time.monotonic() - started < 5
    process.communicate()


def test_reasons_of_many_ranks_add_up_to_one() -> None:
    assert decode(0.0) is None
    codes = {"SIGTERM": 1 << 16, "SIGUSR1": 1, "--exit-after": 1 << 32}
    for name, code in codes.items():
        for ranks in (1, 3, 65_535):
            found = decode(float(code * ranks))
            assert found is not None and name in found.reason
    everything = decode(float(sum(code * 20_000 for code in codes.values())))
    assert everything is not None and everything.status == 143


def test_a_signal_is_known_at_once_however_late_the_thread_comes_to_its_turn() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # no other thread runs
    try:
        with StopRequests() as requests:
            signal.raise_signal(signal.SIGTERM)
            found = decode(requests.code())
    finally:
        sys.setswitchinterval(interval)
    assert found is not None and found.status == 143


def test_handlers_and_files_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with StopRequests(exit_after_minutes=1e-6) as requests:
        time.sleep(0.01)
        found = decode(requests.code())
        assert found is not None and found.status == 3
        signal.raise_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while (found := decode(requests.code())) is None or found.status != 138:
            assert time.monotonic() < deadline
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before

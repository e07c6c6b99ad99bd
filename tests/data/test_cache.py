from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallax.data.cache import build_once, cache_folder
from parallax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

# Argument 1 is the folder to build, 2 is where each build leaves a line, 3 what to do in the middle of it.
PROGRAM = """
import os, sys, time
from pathlib import Path
from parallax.data.cache import build_once
from parallax.errors import ConfigError

folder, log, deed = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def build(target):
    with open(log, "a") as stream:
        stream.write(f"{os.getpid()}\\n")
    (target / "a").write_text("half")
    if deed == "hang":
        print("in the middle", flush=True)
        time.sleep(60)
    time.sleep(0.3)
    if deed == "fail":
        raise ConfigError("line 7 is broken.")
    (target / "b").write_text("whole")

try:
    print((build_once(folder, build, "a test") / "b").read_text())
except ConfigError as error:
    print(error)
"""


def start(folder: Path, log: Path, deed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(log), deed],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    try:
        return [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()


def build_small(folder: Path) -> None:
    (folder / "b").write_text("whole")


def test_many_processes_at_once_build_once_and_all_get_the_result(tmp_path: Path) -> None:
    """Megatron-LM 907, Megatron-DeepSpeed 356: caches built by several ranks, or read half-written."""
    folder, log = tmp_path / "cache" / "x", tmp_path / "log"
    outputs = finish([start(folder, log, "build") for _ in range(16)])
    assert [out for out, _ in outputs] == ["whole\n"] * 16
    assert len(log.read_text().splitlines()) == 1
    assert sum("preparing a test" in err for _, err in outputs) == 1  # only the builder speaks
    assert {path.name for path in folder.parent.iterdir()} == {"x", "x.lock"}


def test_a_builder_killed_in_the_middle_leaves_no_half_result_and_blocks_nobody(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "x", tmp_path / "log"
    builder = start(folder, log, "hang")
    try:
        assert builder.stdout is not None and builder.stdout.readline() == "in the middle\n"
        waiter = start(folder, log, "build")
        time.sleep(0.3)
        assert waiter.poll() is None and not folder.exists()
        builder.send_signal(signal.SIGKILL)
        ((out, _),) = finish([waiter])
    finally:
        finish([builder])
    assert out == "whole\n"
    assert len(log.read_text().splitlines()) == 2
    assert {path.name for path in folder.parent.iterdir()} == {"x", "x.lock"}


def test_processes_that_waited_for_a_failing_builder_say_what_it_said(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "x", tmp_path / "log"
    builder = start(folder, log, "fail")
    wait_for(log)
    outputs = finish([builder, *(start(folder, log, "fail") for _ in range(2))])
    assert all(out == "line 7 is broken.\n" for out, _ in outputs)
    assert not folder.exists()
    assert build_once(folder, build_small, "a test") == folder  # asked for later, so the old failure does not count


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failure_from_before_is_not_taken_for_one_of_now(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (tmp_path / "x.lock").write_text(json.dumps({"time": time.time() - 1, "problems": ["old."]}))
    assert (build_once(folder, build_small, "a test") / "b").read_text() == "whole"
    (tmp_path / "y.lock").write_text('{"time": 17')  # its writer was killed
    assert build_once(tmp_path / "y", build_small, "a test").is_dir()


def test_an_unexpected_error_leaves_nothing_half_built(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "x", build, "a test")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("x")] == ["x.lock"]


@contextmanager
def lock_held(path: Path) -> Iterator[None]:
    """Hold a lock as a builder in another process does."""
    program = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.communicate()


def test_waiting_has_a_limit(tmp_path: Path) -> None:
    with lock_held(tmp_path / "x.lock"), pytest.raises(ConfigError, match=r"x\.lock for more than 0 s.*PARALLAX_CACHE"):
        build_once(tmp_path / "x", build_small, "a test", wait_seconds=0.2)


def test_threads_of_one_process_exclude_one_another_too(tmp_path: Path) -> None:
    built: list[int] = []

    def build(folder: Path) -> None:
        built.append(1)
        time.sleep(0.2)

    threads = [threading.Thread(target=build_once, args=(tmp_path / "x", build, "a test")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "x", Path("/proc/parallax/x")):
        with pytest.raises(ConfigError, match=rf"{folder.parent}.* set PARALLAX_CACHE"):
            build_once(folder, build_small, "a test")


def test_a_full_disk_is_named_with_the_variable_that_moves_the_cache(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, which answers every write as a full disk does")

    def build(folder: Path) -> None:
        Path("/dev/full").write_text("x")

    with pytest.raises(ConfigError, match=r"No space left on device.* set PARALLAX_CACHE"):
        build_once(tmp_path / "x", build, "a test")


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "parallax-cache"
    monkeypatch.delenv("PARALLAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "parallax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "parallax"

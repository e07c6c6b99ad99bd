"""Runs of pretrain.py in processes of their own, as a launcher starts them, that may be killed at any moment.

    with Job(2, f"--out {folder}/run --steps 20", folder) as job:
        job.kill(1)
        assert job.wait() == [5, -9] and "rank 1 ended" in job.output(0)

The processes are forked from one that has imported torch, so a start takes half a second. Their store lives in the test's process,
as it lives in torchrun's, so that it outlives each of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.training.runs import MODEL, write_text

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy", "tests.training.runs"])

Trouble = Callable[[int], None]


def _process_main(environment: dict[str, str], words: list[str], log: str, trouble: Trouble | None) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    import torch

    import pretrain

    torch.set_num_threads(1)
    if trouble is not None:
        trouble(int(environment["RANK"]))
    try:
        pretrain.main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Job:
    """The processes of one start of a run. trouble: called first in each, with its rank; it prepares what goes wrong.

    words: of the command line; for ranks in `others`, what is added to it.
    """

    def __init__(
        self,
        world_size: int,
        words: str,
        folder: Path,
        trouble: Trouble | None = None,
        others: dict[int, str] | None = None,
    ) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        text = folder / "text.txt"
        if not text.exists():
            write_text(folder)
        self._logs = [folder / f"log {time.monotonic_ns()} rank {rank}" for rank in range(world_size)]
        self.processes = []
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "PARALLAX_CACHE": str(folder / "cache"),
            }
            mine = f"{MODEL} --data {text} {words} {(others or {}).get(rank, '')}".split()
            process = _context.Process(
                target=_process_main, args=(environment, mine, str(self._logs[rank]), trouble), daemon=True
            )
            process.start()
            self.processes.append(process)

    def end_launcher(self) -> None:
        """End what the launcher has for its processes: the store."""
        del self._store

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> bool:
        """Send a signal to a rank; return whether it was still there."""
        pid = self.processes[rank].pid
        assert pid is not None
        if not self.processes[rank].is_alive():
            return False
        os.kill(pid, number)
        return True

    def wait(self, seconds: float = 60.0) -> list[int | None]:
        """Return the exit status of each rank, -N for one that signal N ended; None for one that had to be ended here."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        found = [process.exitcode for process in self.processes]
        self.end()
        return found

    def end(self) -> None:
        """End what is still there, at once."""
        for process in self.processes:
            process.kill()
            process.join()

    def output(self, rank: int) -> str:
        """Return what a rank has printed."""
        return self._logs[rank].read_text() if self._logs[rank].exists() else ""

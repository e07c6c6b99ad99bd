"""What a user did wrong, in sentences, and how every entry point says it.

A `ConfigError` holds all problems found at once, so that a command is corrected in one go. `exit_with_problems`
prints them from one rank only and ends with status 2; the other ranks wait a moment first, since a launcher kills the
whole job as soon as one rank ends, and the sentence must have been printed by then. A rank that is still there after
that knows of a problem that rank 0 does not have (another node's files), and says it itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

# What a command exits with, beside 0 (all that was asked for is done) and 1 (an error nobody foresaw, with its traceback).
EXIT_USER_ERROR = 2
EXIT_TIME_UP = 3  # --exit-after; saved
EXIT_BAD_NUMBERS = 4  # a loss or gradient that is no number, or a spike, and --on-bad-step says to stop
EXIT_LOST_RANK = 5  # another process ended, or did not answer in --timeout
EXIT_INTERRUPTED = 130  # Ctrl-C
# 128 + the number of a signal (SIGUSR1 138, SIGTERM 143): saved, and asked to stop by it.

_WAIT_SECONDS = 8.0  # for rank 0 to print, and the launcher to notice that it ended


class ConfigError(ValueError):
    """What was asked cannot be done; each problem is a sentence: what was asked, what is possible, what to change."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(self.problems))


class Stop(Exception):
    """A run ends before its last step, and no option is to blame; all ranks raise it, and one has said why.

    status: what the process exits with.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class LostRank(RuntimeError):
    """A communication failed because another rank ended, did not come in time, or is in another call."""


def exit_for_lost_rank(message: str) -> NoReturn:
    """Say why from one rank, as `exit_with_problems` does, and end this process at once with status 5."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(_WAIT_SECONDS)
    print(
        f"parallax: error (rank {rank}): {message}; all ranks stop, the same command goes on",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_LOST_RANK)


def exit_with_problems(problems: Sequence[str], program: str) -> NoReturn:
    """Print the problems, from global rank 0 if it has them too, and exit with status 2 on every rank."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(_WAIT_SECONDS)  # normally ended by the launcher meanwhile
    where = f" (rank {rank})" if rank != 0 else ""
    for problem in problems:
        print(f"{program}: error{where}: {problem}", file=sys.stderr)
    sys.stderr.flush()
    sys.exit(EXIT_USER_ERROR)

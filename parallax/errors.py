"""What a user did wrong, in sentences, and how every entry point says it.

A `ConfigError` holds all problems found at once, so that a command is corrected in one go. `exit_with_problems`
prints them from one rank only and ends with status 2; the other ranks wait a moment first, since a launcher kills the
whole job as soon as one rank ends, and the sentence must have been printed by then.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

EXIT_USER_ERROR = 2


class ConfigError(ValueError):
    """What was asked cannot be done; each problem is a sentence: what was asked, what is possible, what to change."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(self.problems))


def exit_with_problems(problems: Sequence[str], program: str) -> NoReturn:
    """Print the problems from global rank 0 and exit with status 2 on every rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        for problem in problems:
            print(f"{program}: error: {problem}", file=sys.stderr)
        sys.stderr.flush()
    else:
        # Normally ended by the launcher at once; the bound keeps a rank from outliving a launcher that does not.
        time.sleep(20)
    sys.exit(EXIT_USER_ERROR)

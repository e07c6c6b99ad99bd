"""What the options of several commands have in common: what they refuse, and in which words."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Return the type, as argparse calls it, of an option that counts something."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least {least}")
        return int(text)

    return count


def above_zero(text: str) -> float:
    """Return the number of an option that is a rate, a size or a time; a type of argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number


def listed(
    parser: argparse.ArgumentParser, option: str, text: str, known: Iterable[str], comma: str = ","
) -> list[str]:
    """Return the names that an option holds, with commas between; end the command if there is one that is not known."""
    names, known = text.split(comma), list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{option} {comma.join(unknown)} is unknown; use {', '.join(known)}")
    return names


def run_or_exit(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    quiet: bool = False,
) -> None:
    """Run a command; if it fails, end this one with the same status, since it has said on stderr why. quiet: drop its stdout."""
    stdout = subprocess.DEVNULL if quiet else None
    done = subprocess.run(command, env=environment, cwd=folder, stdout=stdout, check=False)
    if done.returncode:
        sys.exit(done.returncode if done.returncode > 0 else 1)  # killed by a signal is less than 0

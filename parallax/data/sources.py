"""What --data and --valid name: paths, each text or a pair of token files, with or without weights.

    --data notes.txt corpus/ corpus_a         one source, each token once an epoch
    --data 0.7 corpus_a 0.3 notes.jsonl       a blend: a weight before each path
    --valid books=books_a web=web.jsonl       named sets to evaluate on

A path is a pair of token files, if PATH.bin and PATH.idx are there or it is one of the two, else text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from parallax.data.corpus import Reading, behind_address, check_data_path
from parallax.errors import ConfigError
from parallax.storage import is_address

INDEX_MAGIC = b"MMIDIDX\0\0"
NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class DataSource:
    """Paths that are read one after the other, and their weight in a blend; None outside of one."""

    paths: tuple[str, ...]
    weight: Fraction | None = None


def parse_data(words: Sequence[str]) -> list[DataSource]:
    """Return the sources of --data. It is a blend if it begins with a number that is no path.

    Raises:
        ConfigError: weights and paths do not take turns, a weight is not above 0.
    """
    if not words or _weight(words[0]) is None or _exists(words[0]):
        return [DataSource(tuple(words))] if words else []
    sources, problems = [], []
    for word, path in zip(words[::2], [*words[1::2], *[""] * (len(words) % 2)], strict=True):
        weight = _weight(word)
        if weight is None or not path or (_weight(path) is not None and not _exists(path)):
            problems = [
                f"--data {' '.join(words)}: in a blend a weight stands before each path, as in 0.7 corpus_a 0.3 corpus_b; "
                f"{word!r} {'' if path else 'at the end '}breaks that."
            ]
            break
        if weight <= 0:
            problems.append(f"--data {word} {path}: a weight must be above 0; leave the source out, or give one.")
        sources.append(DataSource((path,), weight))
    if problems:
        raise ConfigError(problems)
    return sources


def parse_valid(words: Sequence[str]) -> dict[str, str]:
    """Return {name: path} of --valid.

    Raises:
        ConfigError: a word is not NAME=PATH, or a name stands twice.
    """
    sets: dict[str, str] = {}
    problems = []
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not path or not NAME.fullmatch(name):
            problems.append(
                f"--valid {word}: write NAME=PATH, the name of letters, digits and _.-, as in books=corpus_b."
            )
        elif name in sets:
            problems.append(f"--valid names {name} twice; give each set a name of its own.")
        sets[name] = path
    if problems:
        raise ConfigError(problems)
    return sets


def parse_shares(text: str) -> list[Fraction]:
    """Return the shares, summing to 1, that a value of --split like 98,1,1 gives to training, validation and test.

    Raises:
        ConfigError: it is not of that form, or gives nothing to training.
    """
    words = text.split(",")
    try:
        numbers = [Fraction(word.strip()) for word in words]
    except (ValueError, ZeroDivisionError):
        numbers = []
    if not 2 <= len(numbers) <= 3 or min(numbers) < 0 or not numbers[0]:
        raise ConfigError(
            f"--split {text} must be two or three numbers, the shares of training, validation and test, the first above 0; "
            "as in 98,1,1."
        )
    numbers += [Fraction(0)] * (3 - len(numbers))
    return [number / sum(numbers) for number in numbers]


def is_token_file(given: str) -> bool:
    """Say whether a path names a pair of token files."""
    return given.endswith((".bin", ".idx")) or (not Path(given).exists() and Path(given + ".idx").exists())


def check_path(given: str, flag: str = "--data ") -> list[str]:
    """Say what is wrong with a path, looking only at the first bytes of its files."""
    if is_address(given):
        return [behind_address(f"{flag}{given}")]
    if not is_token_file(given):
        if Path(given).exists() and Path(given + ".idx").exists():
            return [
                f"{flag}{given}: this is text and also the beginning of a pair of token files; write {given}.idx for the "
                f"token files, or rename one of them."
            ]
        problems = check_data_path(given, Reading(flag))
        if problems and Path(given + ".bin").exists() and not Path(given).exists():
            return [f"{flag}{given}: there is {given}.bin, but its index {given}.idx is missing."]
        return problems
    prefix = given.removesuffix(".bin").removesuffix(".idx")
    problems = [
        f"{flag}{given}: there is no {prefix}{suffix}; {prefix}.bin and {prefix}.idx belong together."
        for suffix in (".bin", ".idx")
        if not Path(prefix + suffix).is_file()
    ]
    try:
        if not problems:
            with open(prefix + ".idx", "rb") as stream:
                if stream.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
                    problems = [f"{flag}{given}: {prefix}.idx is no index of a token file."]
    except OSError as error:
        problems = [f"{flag}{given}: {prefix}.idx cannot be read ({error.strerror})."]
    return problems


def _exists(word: str) -> bool:
    return Path(word).exists() or Path(word + ".idx").exists()


def _weight(word: str) -> Fraction | None:
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None

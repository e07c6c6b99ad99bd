"""What to train on: the options of the data, and a check of them that takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from parallax.data.corpus import check_data_path
from parallax.data.tokenizer_source import find_tokenizer
from parallax.errors import ConfigError
from parallax.flags import named

MAX_EVAL_FRACTION = 0.5


@dataclass(frozen=True)
class DataOptions:
    """The text, how it is cut into tokens, and how much of it is held out."""

    data: Annotated[
        tuple[str, ...], named("data", metavar="PATH [PATH ...]", default="the source of Python's standard library")
    ] = ()
    """Files or folders: text, or .jsonl with a "text" key."""

    tokenizer: Annotated[
        str | None, named("tokenizer", metavar="PATH|bytes", default="one trained once on that source, 4096 ids")
    ] = None
    """A sentencepiece .model, a Hugging Face folder or tokenizer.json, or bytes."""

    eval_fraction: float = 0.01
    """Share of the tokens that is held out for evaluation, 0 to 0.5; 0 holds out nothing."""


def check(options: DataOptions) -> list[str]:
    """Say what is wrong with the options, one sentence each, without tokenizing anything."""
    problems: list[str] = []
    if not 0 <= options.eval_fraction <= MAX_EVAL_FRACTION:
        problems.append(
            f"--eval-fraction {options.eval_fraction} is not between 0 and {MAX_EVAL_FRACTION}; "
            "0.01 holds out one token in a hundred, 0 none."
        )
    for path in options.data:
        problems += check_data_path(path)
    resolved = [Path(path).resolve() for path in options.data]
    for path in sorted({str(p) for p in resolved if resolved.count(p) > 1}):
        problems.append(f"--data names {path} more than once; name it once.")
    try:
        find_tokenizer(options.tokenizer)
    except ConfigError as error:
        problems += error.problems
    return problems

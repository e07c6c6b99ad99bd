"""What to train on: the options of the data, and a check of them that takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from parallax.data.sources import check_path, parse_data, parse_shares, parse_valid
from parallax.data.tokenizer_source import find_tokenizer
from parallax.errors import ConfigError
from parallax.flags import named

MAX_EVAL_FRACTION = 0.5
DEFAULT_EVAL_FRACTION = 0.01


@dataclass(frozen=True)
class DataOptions:
    """The text, how it is cut into tokens, and how much of it is held out."""

    data: Annotated[
        tuple[str, ...],
        named("data", "data-path", metavar="[WEIGHT] PATH ...", default="the source of Python's standard library"),
    ] = ()
    """Text, .jsonl or .parquet with a "text" key, also .gz, .zst, folders of them, token files; with weights, a blend."""

    tokenizer: Annotated[
        str | None, named("tokenizer", metavar="PATH|bytes", default="one trained once on that source, 4096 ids")
    ] = None
    """A sentencepiece .model, a Hugging Face folder or tokenizer.json, a run or checkpoint of ours, or bytes."""

    eval_fraction: float = DEFAULT_EVAL_FRACTION
    """Share of the tokens that is held out for evaluation, 0 to 0.5; 0 holds out nothing."""

    split: Annotated[str | None, named("split", metavar="TRAIN,VALID[,TEST]", default="as --eval-fraction says")] = None
    """In place of --eval-fraction: shares of whole documents, in their order, as in 98,1,1."""

    valid: Annotated[tuple[str, ...], named("valid", metavar="NAME=PATH ...", default="none")] = ()
    """More sets to evaluate on, each by its name."""

    document_attention: Annotated[bool, named("document-attention", "reset-attention-mask")] = False
    """Keep attention inside each document."""

    reset_positions: Annotated[bool, named("reset-positions", "reset-position-ids")] = False
    """Count positions from the start of each document."""

    @property
    def nothing_held_out(self) -> str | None:
        """The option that leaves nothing to evaluate on, in words; None if there is something. For options that pass the check."""
        if self.valid:
            return None
        if self.split is not None:
            return None if parse_shares(self.split)[1] else f"--split {self.split}"
        return None if self.eval_fraction else f"--eval-fraction {self.eval_fraction:g}"


def check(options: DataOptions) -> list[str]:
    """Say what is wrong with the options, one sentence each, without tokenizing anything."""
    problems: list[str] = []
    if not 0 <= options.eval_fraction <= MAX_EVAL_FRACTION:
        problems.append(
            f"--eval-fraction {options.eval_fraction} is not between 0 and {MAX_EVAL_FRACTION}; "
            "0.01 holds out one token in a hundred, 0 none."
        )
    elif options.split is not None and options.eval_fraction != DEFAULT_EVAL_FRACTION:
        problems.append(
            f"--split {options.split} and --eval-fraction {options.eval_fraction:g} both say what is held out; give one."
        )
    paths: list[str] = []
    try:
        paths = [path for source in parse_data(options.data) for path in source.paths]
    except ConfigError as error:
        problems += error.problems
    for path in paths:
        problems += check_path(path)
    resolved = [Path(path).resolve() for path in paths]
    for path in sorted({str(p) for p in resolved if resolved.count(p) > 1}):
        problems.append(f"--data names {path} more than once; name it once.")
    try:
        for name, path in parse_valid(options.valid).items():
            problems += check_path(path, f"--valid {name}=")
    except ConfigError as error:
        problems += error.problems
    try:
        find_tokenizer(options.tokenizer)
        if options.split is not None:
            parse_shares(options.split)
    except ConfigError as error:
        problems += error.problems
    return problems

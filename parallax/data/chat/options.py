"""What to fine-tune on: the options of the chats, and a check of them that takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from parallax.data.chat.encoder import check_template
from parallax.data.chat.files import check_chat_file
from parallax.data.options import MAX_EVAL_FRACTION
from parallax.data.tokenizer_source import find_tokenizer
from parallax.errors import ConfigError
from parallax.flags import named


@dataclass(frozen=True)
class ChatOptions:
    """The chats, how they become tokens, and which of those are learned."""

    data: Annotated[
        tuple[str, ...],
        named("data", metavar="[SHARE] PATH ...", default="questions on Python's standard library"),
    ] = ()
    """Files of chats, .jsonl or .parquet; with numbers before them, the shares of the chats: 0.7 a.jsonl 0.3 b.jsonl."""

    tokenizer: Annotated[
        str | None, named("tokenizer", metavar="PATH|bytes", default="the one that pretraining makes, 4096 ids")
    ] = None
    """A Hugging Face folder or tokenizer.json, a sentencepiece .model, or bytes."""

    template: Annotated[
        str | None, named("template", metavar="NAME|FILE", default="the tokenizer's own; chatml where it has none")
    ] = None
    """chatml, llama3, plain, or a file with a template in Jinja."""

    train_on: Literal["last", "all", "full"] = "all"
    """What is learned: the assistant's last turn, all its turns, or everything."""

    too_long: Literal["drop", "truncate", "error"] = "drop"
    """What becomes of chats with more tokens than --seq-len."""

    packing: bool = True
    """Put several chats into one row; otherwise each is padded to --seq-len."""

    loss_per: Literal["token", "sample"] = "token"
    """What counts the same in the loss: every learned token, or every chat."""

    skip_bad: bool = False
    """Leave out chats that cannot be used, and count them."""

    eval_fraction: float = 0.01
    """Share of the chats that is held out for evaluation, 0 to 0.5; 0 holds out nothing."""


@dataclass(frozen=True)
class ChatSource:
    """A file of --data, and its share of the chats; None: all chats count the same."""

    path: str
    share: Fraction | None


def parse_sources(words: tuple[str, ...]) -> list[ChatSource]:
    """Return the files that --data names, with their shares, which sum up to 1.

    Raises:
        ConfigError: some files have a number and others do not, a number is not above 0, a file is named twice.
    """
    numbers = [_number(word) for word in words]
    if not any(number is not None for number in numbers):
        sources = [ChatSource(word, None) for word in words]
    else:
        paths, shares = words[1::2], numbers[::2]
        if len(words) % 2 or None in shares or any(number is not None for number in numbers[1::2]):
            raise ConfigError("--data: give every file a share, as in 0.7 a.jsonl 0.3 b.jsonl, or none.")
        if min(share for share in shares if share is not None) <= 0:
            raise ConfigError("--data: a share must be above 0; leave the file out instead.")
        total = sum(share for share in shares if share is not None)
        sources = [
            ChatSource(path, share / total) for path, share in zip(paths, shares, strict=True) if share is not None
        ]
    resolved = [Path(source.path).resolve() for source in sources]
    if again := sorted({str(path) for path in resolved if resolved.count(path) > 1}):
        raise ConfigError([f"--data names {path} more than once; name it once, with a larger share." for path in again])
    return sources


def check(options: ChatOptions) -> list[str]:
    """Say what is wrong with the options, one sentence each, without reading the chats."""
    problems: list[str] = []
    if not 0 <= options.eval_fraction <= MAX_EVAL_FRACTION:
        problems.append(
            f"--eval-fraction {options.eval_fraction} is not between 0 and {MAX_EVAL_FRACTION}; "
            "0.01 holds out one chat in a hundred, 0 none."
        )
    try:
        problems += [problem for source in parse_sources(options.data) for problem in check_chat_file(source.path)]
    except ConfigError as error:
        problems += error.problems
    try:
        find_tokenizer(options.tokenizer)
    except ConfigError as error:
        problems += error.problems
    return problems + check_template(options.tokenizer, options.template)


def _number(word: str) -> Fraction | None:
    try:
        return Fraction(word)  # exact: 0.1 is a tenth
    except (ValueError, ZeroDivisionError):
        return None

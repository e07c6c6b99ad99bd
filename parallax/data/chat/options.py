"""What to fine-tune on: the options of the chats, and a check of them that takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from parallax.data.chat.encoder import check_template
from parallax.data.chat.files import check_chat_file
from parallax.data.options import MAX_EVAL_FRACTION
from parallax.data.sources import parse_data
from parallax.data.tokenizer_source import find_tokenizer
from parallax.errors import ConfigError
from parallax.flags import named


@dataclass(frozen=True)
class ChatOptions:
    """The chats, how they become tokens, and which of those are learned."""

    data: Annotated[
        tuple[str, ...],
        named("data", metavar="[WEIGHT] PATH ...", default="questions on Python's standard library"),
    ] = ()
    """Files of chats, .jsonl (also .gz, .zst) or .parquet; with weights, shares of the rows: 0.7 a.jsonl 0.3 b.jsonl."""

    tokenizer: Annotated[
        str | None,
        named("tokenizer", metavar="PATH|bytes", default="the model's; of fresh weights that of pretrain.py"),
    ] = None
    """A Hugging Face folder or tokenizer.json, a sentencepiece .model, a run or checkpoint of ours, or bytes."""

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

    @property
    def nothing_held_out(self) -> str | None:
        """The option that leaves nothing to evaluate on, in words; None if there is something."""
        return None if self.eval_fraction else f"--eval-fraction {self.eval_fraction:g}"


def check(options: ChatOptions) -> list[str]:
    """Say what is wrong with the options, one sentence each, without reading the chats."""
    problems: list[str] = []
    if not 0 <= options.eval_fraction <= MAX_EVAL_FRACTION:
        problems.append(
            f"--eval-fraction {options.eval_fraction} is not between 0 and {MAX_EVAL_FRACTION}; "
            "0.01 holds out one chat in a hundred, 0 none."
        )
    try:
        paths = [path for source in parse_data(options.data) for path in source.paths]
        problems += [problem for path in dict.fromkeys(paths) for problem in check_chat_file(path)]
        resolved = [Path(path).resolve() for path in paths]
        again = sorted({str(path) for path in resolved if resolved.count(path) > 1})
        problems += [f"--data names {path} more than once; name it once." for path in again]
    except ConfigError as error:
        problems += error.problems
    try:
        find_tokenizer(options.tokenizer)
    except ConfigError as error:
        problems += error.problems
    return problems + check_template(options.tokenizer, options.template)

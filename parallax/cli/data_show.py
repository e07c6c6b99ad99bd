"""`parallax data show`: chats as the tokens that a model sees, with those that it learns marked.

    chats.jsonl, line 1: 17 tokens, 3 learned
    <|im_start|>·user·\\n
    ·hi·<|im_end|>·\\n
    ·<|im_start|>·assistant·\\n
    ·«hel·lo·<|im_end|>»·\\n

Learned tokens are green on a terminal, and between « and » elsewhere. Characters that would move the cursor are written as escapes.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence

from parallax.checkpoint.find import tokenizer_of
from parallax.errors import ConfigError
from parallax.models.hugging_face_config import read_fields
from parallax.storage import location

GREEN, DIM, PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"

SHOW_HELP = """Show chats as tokens, and which of them are learned.

Without a file: the chats about Python's standard library, on which finetune_sft.py trains by default."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the parser of this command to those of `parallax data`."""
    show = commands.add_parser(
        "show",
        help="show chats as tokens, and which of them are learned",
        description=SHOW_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    show.add_argument("paths", metavar="PATH", nargs="*", help="files of chats, .jsonl or .parquet")
    show.add_argument(
        "--tokenizer",
        metavar="PATH|bytes",
        help="a Hugging Face folder or tokenizer.json, a sentencepiece .model, a run or checkpoint of ours, or bytes (default: "
        "that of pretrain.py)",
    )
    show.add_argument(
        "--template",
        metavar="NAME|FILE",
        help="chatml, llama3, plain, or a file with a template in Jinja (default: the tokenizer's own; chatml if it has none)",
    )
    show.add_argument(
        "--train-on", choices=["last", "all", "full"], default="all", help="what is learned (default: all)"
    )
    show.add_argument("--limit", metavar="N", type=_limit, help="show the first N chats (default: all)")
    show.add_argument("--skip-bad", action="store_true", help="leave out chats that cannot be used, and count them")
    show.add_argument(
        "--json", action="store_true", help="print an object a line, with input_ids and trained: [[start, end], ...]"
    )
    show.set_defaults(run=_show)


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no number of chats; give a whole number")
    return int(text)


def _show(words: argparse.Namespace) -> int:
    try:
        return _show_chats(words)
    except ConfigError as error:  # of files that are --data's in training, and here stand alone
        raise ConfigError([_without_flag(problem) for problem in error.problems]) from error


def _without_flag(problem: str) -> str:
    return problem.replace("--data ", "")


def _show_chats(words: argparse.Namespace) -> int:
    from parallax.data.chat.encoded import spans
    from parallax.data.chat.encoder import load_chat_encoder, notice_of_ids, problem_of_ids
    from parallax.data.chat.files import check_chat_file
    from parallax.data.chat.store import Sample, encode_chats, no_chats, only_good, read_located

    if problems := [problem for path in words.paths for problem in check_chat_file(path)]:
        raise ConfigError(problems)
    given = tokenizer_of(words.tokenizer)
    tokenizer, encoder = load_chat_encoder(given, words.template)
    family, vocab_size = _model_beside(given)
    problem = "" if vocab_size is None else problem_of_ids(tokenizer, encoder, vocab_size)
    for notice in filter(None, (encoder.notice, notice_of_ids(tokenizer, encoder, family), problem)):
        print(notice, file=sys.stderr)
    bad: list[Sample] = []
    chats = itertools.chain.from_iterable(read_located(path) for path in words.paths or [None])
    samples = only_good(encode_chats(chats, encoder, words.train_on), words.skip_bad, bad.append)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    coloured = _is_coloured()
    num_chats = num_tokens = num_learned = 0
    for sample in itertools.islice(samples, words.limit):
        found = spans(sample.weights)
        learned = sum(stop - start for start, stop in found)
        num_chats, num_tokens, num_learned = num_chats + 1, num_tokens + len(sample.input_ids), num_learned + learned
        if words.json:
            print(json.dumps({"input_ids": sample.input_ids, "trained": found}))
        else:
            print(f"{sample.file}, line {sample.line}: {len(sample.input_ids):,} tokens, {learned:,} learned")
            print("".join(_marked(encoder.pieces(sample.input_ids), found, coloured)).rstrip("\n") + "\n")
    if not num_chats and words.limit != 0:
        raise ConfigError(no_chats(" ".join(words.paths), bad))
    share = f" ({num_learned / num_tokens:.1%})" if num_tokens else ""
    if not words.json:
        noun = "chat" if num_chats == 1 else "chats"
        print(f"{num_chats:,} {noun}, {num_tokens:,} tokens, {num_learned:,} learned{share}; template {encoder.name}")
    for sample in bad[:10]:
        print(f"left out: {_without_flag(sample.problem)}", file=sys.stderr)
    if len(bad) > 10:
        print(f"left out: {len(bad) - 10:,} more", file=sys.stderr)
    return 0


def _model_beside(tokenizer: str | None) -> tuple[str | None, int | None]:
    """Return the model_type and the number of ids of the model in a tokenizer's folder; None where it does not say."""
    if tokenizer is None or not (file := location(tokenizer) / "config.json").is_file():
        return None, None
    fields = read_fields(file)
    family, vocab_size = fields.get("model_type"), fields.get("vocab_size")
    return family if isinstance(family, str) else None, vocab_size if isinstance(vocab_size, int) else None


def _is_coloured() -> bool:
    """Say whether to use colours, by the conventions of no-color.org and force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def _marked(pieces: Sequence[str], found: Sequence[tuple[int, int]], coloured: bool) -> Iterator[str]:
    """Yield the tokens as text with a dot between them and marks around the learned ones."""
    begin, end = (GREEN, PLAIN) if coloured else ("«", "»")
    dot = f"{DIM}·{PLAIN}" if coloured else "·"
    inside = {i for start, stop in found for i in range(start, stop)}
    starts, stops = {start for start, _ in found}, {stop - 1 for _, stop in found}
    for i, piece in enumerate(pieces):
        yield dot if i else ""
        opens = i in inside if coloured else i in starts
        closes = i in inside if coloured else i in stops
        yield (begin if opens else "") + _visible(piece) + (end if closes else "")
        yield "\n" if piece.endswith("\n") else ""


def _visible(piece: str) -> str:
    """Return a token's text without what a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)

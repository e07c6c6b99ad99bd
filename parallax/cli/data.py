"""`parallax data build`: text to token files."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from parallax.cli import data_show

if TYPE_CHECKING:
    from parallax.data.build import BuildOptions, Built

BUILD_HELP = """Make token files of text: OUT.bin and OUT.idx in Megatron-LM's format.

The files are the same for any number of workers, and appear when they are whole. What broke on the way leaves nothing behind."""


def add_commands(groups: argparse._SubParsersAction) -> None:
    """Add the parsers of this group."""
    group = groups.add_parser("data", help="make token files of text, show chats as tokens", allow_abbrev=False)
    commands = group.add_subparsers(metavar="COMMAND", required=True, dest="data_command")
    build = commands.add_parser(
        "build",
        help="make token files of text",
        description=BUILD_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    build.add_argument(
        "inputs",
        metavar="PATH",
        nargs="+",
        help="files and folders: .jsonl with a document a line, .parquet with one a row, others one each; also .gz, .zst",
    )
    build.add_argument(
        "--tokenizer",
        metavar="PATH|bytes",
        help="a Hugging Face folder or tokenizer.json, a sentencepiece .model, a run or checkpoint of ours, or bytes (default: "
        "that of pretrain.py)",
    )
    build.add_argument("--out", metavar="PREFIX", required=True, help="the files to write, without .bin and .idx")
    build.add_argument("--workers", metavar="N", type=int, help="processes that tokenize (default: the cores)")
    build.add_argument("--append-eod", action="store_true", help="end each document with the end-of-text id")
    build.add_argument(
        "--json-key", "--json-keys", metavar="KEY", default="text", help="of the text in a record (default: text)"
    )
    build.add_argument("--skip-bad", action="store_true", help="leave out broken lines, and count them")
    build.add_argument(
        "--format", choices=["jsonl", "parquet", "text"], help="of all files (default: what their names say)"
    )
    build.set_defaults(run=_build)
    data_show.add_parser(commands)


def _build(words: argparse.Namespace) -> int:
    from parallax.checkpoint.find import tokenizer_of
    from parallax.data.build import BuildOptions

    return run_build(
        BuildOptions(
            words.inputs,
            tokenizer_of(words.tokenizer),
            words.out,
            words.workers,
            words.json_key,
            words.append_eod,
            words.skip_bad,
            words.format,
        )
    )


def run_build(options: BuildOptions) -> int:
    """Build, with a progress bar on standard error where that is a terminal, and say what came out."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from parallax.data.build import build

    started = time.perf_counter()
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def show(done: int, total: int, tokens: int) -> None:
            speed = tokens / (time.perf_counter() - started)
            bar.update(task, completed=done, total=total, description=f"{tokens:,} tokens, {speed:,.0f}/s")

        try:
            built = build(options, show)
        except KeyboardInterrupt:
            print("stopped; nothing was written", file=sys.stderr)
            return 130
    _report(built, time.perf_counter() - started)
    if not options.append_eod and built.num_documents > 1:
        print(
            "no end-of-text id is between the documents, so they run into each other; --append-eod ends each with one",
            file=sys.stderr,
        )
    return 0


def _report(built: Built, seconds: float) -> None:
    for problem in built.problems:
        print(f"left out: {problem}", file=sys.stderr)
    if built.num_bad > len(built.problems):
        print(f"left out: {built.num_bad - len(built.problems)} more broken lines", file=sys.stderr)
    left_out = [
        f"{count:,} {one if count == 1 else many}"
        for count, one, many in (
            (built.num_bad, "broken line", "broken lines"),
            (built.num_empty, "document without text", "documents without text"),
            (built.num_skipped_files, "file that is not text", "files that are not text"),
        )
        if count
    ]
    size = built.bin_path.stat().st_size + built.idx_path.stat().st_size
    documents = "1 document" if built.num_documents == 1 else f"{built.num_documents:,} documents"
    print(
        f"{built.bin_path} and {built.idx_path.name}: {documents}, {built.num_tokens:,} tokens "
        f"({built.dtype}), {size / 2**20:,.1f} MiB, in {seconds:.1f} s"
        + f"; left out {', '.join(left_out)}"
        * bool(left_out)
    )

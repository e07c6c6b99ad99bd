"""Measure how fast text becomes tokens: `parallax data build` against the loops that others use, with the same tokenizer.

    python benchmarks/data_build.py
    python benchmarks/data_build.py --mib 200 --workers 8 --tokenizer PATH --json data_build.json

    parallax         workers are sent blocks of lines, and send back ids as bytes
    megatron-core    as Megatron-LM's tools/preprocess_data.py does it: a multiprocessing.Pool is sent lines, 32 at a time, and
                     sends back lists of ids, which go to its IndexedDatasetBuilder one document at a time
    datasets         load_dataset("json"), then map in batches with as many processes, into Arrow files

All read one .jsonl of pieces of Python's standard library and take turns; the figures are the best of the rounds, by the clock and
by the processor time of all processes, which is the steadier one on a machine that does other work. The token files of the first
two are compared, byte for byte, and the third's tokens are counted. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import filecmp
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

# Running a file puts its own folder on the search path, and the checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import describe_machine
from benchmarks.options import at_least
from parallax.data import IndexedDataset, load_tokenizer
from parallax.data.build import BuildOptions, build
from parallax.data.corpus import standard_library
from parallax.data.encoding.pool import usable_cores
from parallax.data.indexed.layout import index_dtype
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError, exit_with_problems

DOCUMENT_CHARACTERS = 3000  # about the median of web text

_tokenizer: Tokenizer  # of a process of a pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=at_least(1), default=40, help="size of the text (default: 40)")
    parser.add_argument(
        "--workers", type=at_least(1), default=usable_cores(), help="processes of each (default: the cores)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=3, help="times that each has its turn (default: 3)")
    parser.add_argument("--tokenizer", metavar="PATH|bytes", help="as in pretrain.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    try:
        load_tokenizer(options.tokenizer)
    except ConfigError as error:
        exit_with_problems(error.problems, parser.prog)
    machine = describe_machine()
    print("  ".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, options.mib << 20)
        figures = compete(corpus, options.tokenizer, options.workers, options.rounds)
    print(
        f"\n| {options.workers} processes, {options.mib} MiB | tokens/s | parallax / it | tokens per CPU second | parallax / it |"
    )
    print("|---|---|---|---|---|")
    first = figures["parallax"]
    for name, (speed, economy) in figures.items():
        print(f"| {name} | {speed:,.0f} | {first[0] / speed:.2f} | {economy:,.0f} | {first[1] / economy:.2f} |")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "tokens_per_second": figures}, indent=1) + "\n")


def write_corpus(path: Path, size: int) -> None:
    """Write about `size` bytes of documents, each a few functions long."""
    texts = [file.path.read_text(encoding="utf-8-sig") for file in standard_library().files]
    documents = [
        text[start : start + DOCUMENT_CHARACTERS]
        for text in texts
        for start in range(0, len(text), DOCUMENT_CHARACTERS)
    ]
    written = 0
    with open(path, "w", encoding="utf-8") as stream:
        for number, text in enumerate(itertools.cycle(documents)):
            written += stream.write(json.dumps({"id": number, "text": text}) + "\n")
            if written >= size:
                return


def compete(corpus: Path, tokenizer: str | None, workers: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the best of each contestant: tokens per second, and tokens per second of processor time."""
    vocab_size = load_tokenizer(tokenizer).vocab_size
    contestants: dict[str, Callable[[str | None, int, Path, int], int]] = {
        "parallax": ours,
        "megatron-core": megatron,
        "datasets": hugging_face,
    }
    best: dict[str, tuple[float, float]] = {}
    counts: dict[str, int] = {}
    for _ in range(rounds):
        for name in list(contestants):
            started, used = time.perf_counter(), cpu_seconds()
            try:
                counts[name] = contestants[name](tokenizer, workers, corpus, vocab_size)
            except ImportError as error:
                print(f"{name} is left out: {error}", flush=True)
                del contestants[name]
                continue
            speed, economy = best.get(name, (0.0, 0.0))
            best[name] = (
                max(speed, counts[name] / (time.perf_counter() - started)),
                max(economy, counts[name] / (cpu_seconds() - used)),
            )
    assert len(set(counts.values())) == 1, f"not the same tokens: {counts}"
    for suffix in (".bin", ".idx"):
        files = [corpus.with_name(name + suffix) for name in ("parallax", "megatron-core") if name in counts]
        assert all(filecmp.cmp(files[0], file, shallow=False) for file in files), f"different {suffix} files"
    return best


def cpu_seconds() -> float:
    """Return the processor time of this process and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def ours(tokenizer: str | None, workers: int, corpus: Path, vocab_size: int) -> int:
    """Build token files with Parallax; return the number of tokens."""
    prefix = corpus.with_name("parallax")
    return build(BuildOptions([str(corpus)], tokenizer, str(prefix), workers, append_eod=True)).num_tokens


def megatron(tokenizer: str | None, workers: int, corpus: Path, vocab_size: int) -> int:
    """Build token files with a pool and megatron-core's builder; return the number of tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it would use if it were there
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    prefix = str(corpus.with_name("megatron-core"))
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=index_dtype(vocab_size).type)
    context = multiprocessing.get_context("fork")
    with open(corpus, encoding="utf-8") as lines, context.Pool(workers, _open_tokenizer, (tokenizer,)) as pool:
        for ids in pool.imap(_ids_of_line, lines, 32):
            builder.add_document(ids, [len(ids)])
    builder.finalize(prefix + ".idx")
    return int(IndexedDataset(prefix).lengths.sum(dtype=np.int64))


def _open_tokenizer(given: str | None) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(given)
    _tokenizer.max_threads = 1


def _ids_of_line(line: str) -> list[int]:
    assert _tokenizer.eos_id is not None
    return [*_tokenizer.encode(json.loads(line)["text"]), _tokenizer.eos_id]


def hugging_face(given: str | None, workers: int, corpus: Path, vocab_size: int) -> int:
    """Tokenize with datasets.map; return the number of tokens."""
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    import datasets

    tokenizer = load_tokenizer(given)
    tokenizer.max_threads = 1
    eos_id = tokenizer.eos_id
    assert eos_id is not None, "documents end with it"

    def encode(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        arrays = tokenizer.encode_batch(batch["text"])
        return {"input_ids": [np.append(ids, eos_id).astype(np.int32) for ids in arrays]}

    with tempfile.TemporaryDirectory() as cache:
        data = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
        data = data.map(encode, batched=True, num_proc=workers, remove_columns=data.column_names, new_fingerprint="ids")
        column = data.data.column("input_ids")
        return sum(len(chunk.flatten()) for chunk in column.chunks)


if __name__ == "__main__":
    main()

"""Chats as token ids and weights on disk, made once and mapped into memory by every rank.

    tokens.bin    uint32: ids of all chats in order          weights.bin   float32: what the loss of each counts, not shifted
    starts.npy    int64 [chats + 1]: where each begins       lines.npy     int64 [chats]: its line in the file
    labels.npy    int64 [chats]: how many of its tokens the loss is taken of
    record.json   how many there are, how many could not be used, and why the first of those could not

What depends on the length of a row, cutting and packing, is no part of it: another --seq-len reads the same folder. `fingerprint`
is of what was made as well as of what it was made from: a template that writes today's date makes other data tomorrow, and says so.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallax.data.cache import build_once, cache_folder, digest
from parallax.data.chat.encoded import ChatEncoder, TrainOn, token_weights
from parallax.data.chat.files import read_chats
from parallax.data.chat.instruct import standard_library_chats
from parallax.data.chat.records import BadChat, Chat
from parallax.data.checksums import DataFile, file_records, fingerprint_of
from parallax.data.corpus import Corpus, TextFile, standard_library
from parallax.errors import ConfigError

FORMAT_VERSION = 2

Located = tuple[str, int, Chat | BadChat]  # file, line


@dataclass(frozen=True)
class ChatStore:
    """Encoded chats, mapped read-only; made of `files`. `num_bad` were left out, `first_bad` says why the first was.

    tokens, weights: `[tokens]`; starts: `[chats + 1]`; lines, labels: `[chats]`. has_weights: some are neither 0 nor 1.
    """

    source: str
    tokens: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    lines: np.ndarray
    labels: np.ndarray
    has_weights: bool
    num_bad: int
    first_bad: str
    fingerprint: str
    files: tuple[DataFile, ...]

    def __len__(self) -> int:
        return len(self.starts) - 1


def chat_store(path: str | None, encoder: ChatEncoder, train_on: TrainOn, skip_bad: bool) -> ChatStore:
    """Return the chats of a file, None: those of the standard library; made now if the cache does not have them.

    Raises:
        ConfigError: the file cannot be read; a chat cannot be used and `skip_bad` is not set; none can.
    """
    corpus = standard_library() if path is None else Corpus((TextFile(Path(path), Path(path).name),), 0, path)
    source = "the functions of Python's standard library" if path is None else path
    paths, names = [file.path for file in corpus.files], [file.name for file in corpus.files]
    records = file_records(paths, names, f"the checksums of {source}")
    parts = (fingerprint_of(records), encoder.fingerprint, train_on, str(skip_bad), str(path is None))
    key = digest("chats", str(FORMAT_VERSION), *parts)

    def build(folder: Path) -> None:
        _write(folder, encode_chats(read_located(path, corpus), encoder, train_on), source, skip_bad, key)

    return _open(build_once(cache_folder() / f"chats-{key}", build, f"the chats of {source}"), source, tuple(records))


def read_located(path: str | None, corpus: Corpus | None = None) -> Iterator[Located]:
    """Yield (file, line, chat or what is wrong with it) of a file, None: of the standard library, whose files are `corpus`."""
    if path is not None:
        yield from ((path, line, chat) for line, chat in read_chats(path))
    else:
        chats = standard_library_chats(corpus or standard_library())
        yield from ((str(file.path), line, chat) for file, line, chat in chats)


@dataclass(frozen=True)
class Sample:
    """A chat as `input_ids` and float32 `weights`, both `[tokens]`, and where it stands; or `bad`: why it is none."""

    file: str
    line: int
    input_ids: list[int]
    weights: np.ndarray
    bad: str = ""

    @property
    def problem(self) -> str:
        """What is wrong with it, as a sentence with file and line."""
        return f"--data {self.file}, line {self.line}: {self.bad}."


def no_chats(source: str, bad: Sequence[Sample]) -> str:
    """Say that `source` has no chats, but for those that cannot be used, `bad`."""
    if not bad:
        return f"{source} holds no chat; give one with chats."
    return f"{source} holds no chat that can be used: {len(bad):,} are left out, the first because: {bad[0].problem}"


def encode_chats(chats: Iterable[Located], encoder: ChatEncoder, train_on: TrainOn) -> Iterator[Sample]:
    """Yield each chat as a sample, or what is wrong with it."""
    for file, line, chat in chats:
        try:
            if isinstance(chat, BadChat):
                raise chat
            encoded = encoder.encode(chat)
            weights = token_weights(encoded, chat, train_on, encoder.name)
            yield Sample(file, line, encoded.input_ids, weights)
        except BadChat as error:
            yield Sample(file, line, [], np.zeros(0, np.float32), str(error))


def only_good(samples: Iterable[Sample], skip_bad: bool, on_bad: Callable[[Sample], None]) -> Iterator[Sample]:
    """Yield the samples that can be used; with `skip_bad` the others go to `on_bad`.

    Raises:
        ConfigError: one cannot be used and `skip_bad` is not set.
    """
    for sample in samples:
        if not sample.bad:
            yield sample
        elif skip_bad:
            on_bad(sample)
        else:
            raise ConfigError(f"{sample.problem[:-1]}; --skip-bad leaves such chats out and counts them.")


def _write(folder: Path, samples: Iterable[Sample], source: str, skip_bad: bool, key: str) -> None:
    starts, lines, labels = array("q", [0]), array("q"), array("q")
    has_weights = False
    bad: list[Sample] = []
    state = hashlib.blake2b(digest_size=16)
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "weights.bin", "wb") as weights:
        for sample in only_good(samples, skip_bad, bad.append):
            ids = np.asarray(sample.input_ids, dtype="<u4")
            for stream, values in ((tokens, ids), (weights, sample.weights.astype("<f4"))):
                content = values.tobytes()
                stream.write(content)
                state.update(content)
            starts.append(starts[-1] + len(ids))
            lines.append(sample.line)
            labels.append(int((sample.weights[1:] > 0).sum()))  # the first token is predicted from nothing
            has_weights |= not np.isin(sample.weights, (0, 1)).all()
    if not lines:
        raise ConfigError(no_chats(source, bad))
    for name, column in (("starts", starts), ("lines", lines), ("labels", labels)):
        np.save(folder / f"{name}.npy", np.frombuffer(column, dtype=np.int64).astype("<i8"), allow_pickle=False)
    record = {
        "format_version": FORMAT_VERSION,
        "fingerprint": digest(key, state.hexdigest(), np.frombuffer(starts, dtype=np.int64).astype("<i8").tobytes()),
        "source": source,
        "num_chats": len(lines),
        "num_tokens": starts[-1],
        "has_weights": bool(has_weights),
        "num_bad": len(bad),
        "first_bad": bad[0].problem if bad else "",
    }
    (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")


def _open(folder: Path, source: str, files: tuple[DataFile, ...]) -> ChatStore:
    try:
        record = json.loads((folder / "record.json").read_text())
        starts, lines, labels = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("starts", "lines", "labels")
        )
        tokens = np.memmap(folder / "tokens.bin", dtype="<u4", mode="r")
        weights = np.memmap(folder / "weights.bin", dtype="<f4", mode="r")
        whole = len(tokens) == len(weights) == record["num_tokens"] == starts[-1]
        if not whole or not len(lines) == len(labels) == len(starts) - 1 == record["num_chats"]:
            raise ValueError("the sizes of its files differ from those recorded")
        arrays = (tokens, weights, starts, lines, labels)
        bad = (record["num_bad"], record["first_bad"])
        return ChatStore(source, *arrays, record["has_weights"], *bad, record["fingerprint"], files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the cached data in {folder} is damaged ({error}); delete that folder.") from error

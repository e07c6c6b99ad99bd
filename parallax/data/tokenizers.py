"""One interface over bytes, sentencepiece models and Hugging Face tokenizers.

    kind            ids                          text comes back exactly
    bytes           256 bytes, then eos          always
    default         sentencepiece BPE, 4096      always
    sentencepiece   as sentencepiece gives them  if the model normalises nothing and knows bytes
    huggingface     as `tokenizers` gives them   as its author chose

Encoding adds nothing: no beginning-of-text, no end-of-text; the data puts `eos_id` after each document. Saving writes
what `transformers` needs to open the folder with the same ids, so a checkpoint carries its tokenizer.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parallax.data import tokenizer_files
from parallax.data.cache import digest
from parallax.data.tokenizer_source import POSSIBLE, find_tokenizer
from parallax.errors import ConfigError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as FastTokenizer

DEFAULT_TOKENIZER = "the default tokenizer"
NUM_BYTES = 256
SPACE_MARK = "\u2581"  # sentencepiece writes a space as this character, and so cannot tell the two apart
MAX_ENCODING_THREADS = 16
HUGGING_FACE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(ABC):
    """Turns text into ids in 0 .. vocab_size - 1 and back.

    `eos_id` separates documents, `bos_id` begins a text where the tokenizer's models expect it; None where it has none.
    `fingerprint` is a hash of what determines the ids: equal fingerprints give equal ids. `given` is what `load_tokenizer`
    opens it from, in another process too. `max_threads` limits those of `encode_batch`.
    """

    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    fingerprint: str
    description: str
    given: str
    max_threads: int = MAX_ENCODING_THREADS

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as an array of integers, several texts at once where there are cores."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; special tokens have none."""

    @abstractmethod
    def token_id(self, name: str) -> int | None:
        """Return the id of the one token that is written `name`, a special token's too; None where there is none."""

    @abstractmethod
    def token_name(self, token: int) -> str:
        """Return how the vocabulary writes an id."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the files, by name, from which `transformers` and `load_tokenizer` open this tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with nothing added."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into an existing folder."""
        for name, content in self.files().items():
            (Path(folder) / name).write_bytes(content)


def load_tokenizer(given: str | Path | None = None) -> Tokenizer:
    """Open what --tokenizer names; None is the default, which is trained at its first use on this machine.

    Raises:
        ConfigError: there is no such file, or it cannot be read as a tokenizer.
    """
    source = find_tokenizer(None if given is None else str(given))
    if source.kind == "bytes":
        return ByteTokenizer()
    if source.kind == "huggingface":
        assert source.path is not None
        return HuggingFaceTokenizer(source.path)
    if source.kind == "default":
        from parallax.data.default_tokenizer import default_model_file

        return SentencePieceTokenizer(default_model_file(), DEFAULT_TOKENIZER)
    assert source.path is not None
    return SentencePieceTokenizer(source.path)


def saved_fingerprint(tokenizer: Tokenizer) -> str:
    """Return the fingerprint of the tokenizer as it is after it was saved and opened again, which may be another kind of it.

    Equal ones give equal ids, but for the names of special tokens in a text, and the characters that are read as spaces.
    """
    saved = tokenizer.files().get("tokenizer.json")
    return tokenizer.fingerprint if saved is None else _fingerprint_of_json(saved, tokenizer.eos_id)


def _fingerprint_of_json(content: bytes, eos_id: int | None) -> str:
    return digest("huggingface", content, str(eos_id))


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of a document."""

    def __init__(self) -> None:
        self.vocab_size = NUM_BYTES + 1
        self.eos_id = NUM_BYTES
        self.bos_id = None
        self.fingerprint = digest("bytes", "1")
        self.description = self.given = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are no UTF-8, as in the middle of a generated character, become U+FFFD."""
        return bytes(int(i) for i in ids if i != self.eos_id).decode(errors="replace")

    def token_id(self, name: str) -> int | None:
        if name == tokenizer_files.END_OF_TEXT:
            return self.eos_id
        return ord(name) if len(name) == 1 and name.isascii() else None

    def token_name(self, token: int) -> str:
        return tokenizer_files.END_OF_TEXT if token == self.eos_id else f"<0x{token:02X}>"

    def files(self) -> dict[str, bytes]:
        return tokenizer_files.byte_files()


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; the default one gives every text back exactly, U+2581 included."""

    def __init__(self, path: Path, description: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = path.read_bytes()
        try:
            self._processor = SentencePieceProcessor(model_proto=self._model)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"--tokenizer {path}: sentencepiece cannot read the model; {POSSIBLE}.") from error
        self.vocab_size = self._processor.get_piece_size()
        eos_id, bos_id = self._processor.eos_id(), self._processor.bos_id()
        self.eos_id = eos_id if eos_id >= 0 else None
        self.bos_id = bos_id if bos_id >= 0 else None
        self.fingerprint = digest("sentencepiece", self._model)
        self.description = description or str(path)
        self.given = str(path)
        self._space_mark_ids = _space_mark_as_bytes(self._processor)
        self._files: dict[str, bytes] | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        threads = min(os.cpu_count() or 1, self.max_threads, len(texts)) or 1
        encoded = self._processor.encode(list(texts), num_threads=threads)
        if self._space_mark_ids:
            for i, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[i] = self._encode_with_space_marks(text, self._space_mark_ids)
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def _encode_with_space_marks(self, text: str, mark: list[int]) -> list[int]:
        first, *rest = text.split(SPACE_MARK)
        ids: list[int] = self._processor.encode(first)
        for part in rest:
            ids += mark + self._processor.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([int(i) for i in ids])
        return text

    def token_id(self, name: str) -> int | None:
        found: int = self._processor.piece_to_id(name)
        return None if self._processor.is_unknown(found) else found

    def token_name(self, token: int) -> str:
        name: str = self._processor.id_to_piece(int(token))
        return name

    def files(self) -> dict[str, bytes]:
        # Once: it encodes all pieces by a tokenizer made for that, whose memory does not come back.
        if self._files is None:
            self._files = tokenizer_files.sentencepiece_files(self._processor, self._model)
        return dict(self._files)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, read by the `tokenizers` library; special tokens written in the text become their ids."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        names = HUGGING_FACE_FILES if path.name == "tokenizer.json" else ()
        self._files = {name: (path.parent / name).read_bytes() for name in names if (path.parent / name).is_file()}
        self._files["tokenizer.json"] = path.read_bytes()
        try:
            self._fast = FastTokenizer.from_str(self._files["tokenizer.json"].decode())
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"--tokenizer {path}: the file is no valid tokenizer.json ({error}).") from error
        # A file may ask for truncation or padding, which is right for a classifier and loses text here.
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        names_of_special = _special_names(self._files, path)
        self.eos_id = _special_id(self._fast, names_of_special.get("eos_token"), path, guesses=END_OF_TEXT_NAMES)
        self.bos_id = _special_id(self._fast, names_of_special.get("bos_token"), path)
        self.fingerprint = _fingerprint_of_json(self._files["tokenizer.json"], self.eos_id)
        self.description = self.given = str(path)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.int32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_id(self, name: str) -> int | None:
        return self._fast.token_to_id(name)

    def token_name(self, token: int) -> str:
        return self._fast.id_to_token(int(token)) or ""

    def files(self) -> dict[str, bytes]:
        files = dict(self._files)
        if "tokenizer_config.json" not in files:
            eos = None if self.eos_id is None else self._fast.id_to_token(self.eos_id)
            files["tokenizer_config.json"] = tokenizer_files.config_file(eos_token=eos)
        return files


def _space_mark_as_bytes(processor: SentencePieceProcessor) -> list[int] | None:
    """Return the byte pieces of U+2581, for models whose pieces can be put side by side; else None.

    A model that puts a space before each text cannot encode a text part by part.
    """
    ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    if all(processor.is_byte(i) for i in ids) and processor.decode(processor.encode("a  b ")) == "a  b ":
        if not processor.encode("a", out_type=str)[0].startswith(SPACE_MARK):
            return ids
    return None


def _special_names(files: dict[str, bytes], path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            content = json.loads(files.get(file, b"{}"))
        except ValueError as error:
            raise ConfigError(f"--tokenizer {path}: {file} beside it is no valid JSON ({error}).") from error
        if not isinstance(content, dict):
            raise ConfigError(f"--tokenizer {path}: {file} beside it is no object of JSON.")
        names |= {key: value for key, value in content.items() if key in ("eos_token", "bos_token") and value}
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in names.items()}
    for key, value in names.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"--tokenizer {path}: {key} in the configuration beside it is {value!r}, which is no name of a token."
            )
    return names


def _special_id(fast: FastTokenizer, name: str | None, path: Path, guesses: Sequence[str] = ()) -> int | None:
    """Return the id of a special token; a tokenizer that names none has it if it knows exactly one usual name."""
    if name is not None:
        found = fast.token_to_id(name)
        if found is None:
            raise ConfigError(f"--tokenizer {path}: its configuration names the special token {name!r}, not in it.")
        return found
    known = [found for guess in guesses if (found := fast.token_to_id(guess)) is not None]
    return known[0] if len(known) == 1 else None

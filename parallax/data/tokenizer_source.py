"""What --tokenizer names: told from the name and the first bytes, without loading a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parallax.errors import ConfigError
from parallax.storage import local_copy

POSSIBLE = "give a sentencepiece .model, a Hugging Face tokenizer folder or tokenizer.json, or bytes"


@dataclass(frozen=True)
class TokenizerSource:
    """Which kind of tokenizer it is, and its main file (tokenizer.json or the sentencepiece model) where it has one."""

    kind: Literal["default", "bytes", "sentencepiece", "huggingface"]
    path: Path | None = None


def find_tokenizer(given: str | None) -> TokenizerSource:
    """Tell what the value of --tokenizer names; None is the default.

    Raises:
        ConfigError: there is no such file or folder, or it holds no tokenizer that can be read.
    """
    if given is None:
        return TokenizerSource("default")
    if given == "bytes":
        return TokenizerSource("bytes")
    try:
        path = local_copy(given)
        if path.is_dir():
            path = _main_file(path, given)
        elif not path.exists():
            raise ConfigError(f"--tokenizer {given}: there is no such file or folder; {POSSIBLE}.")
        with open(path, "rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise ConfigError(f"--tokenizer {given}: it cannot be read ({error.strerror}).") from error
    if path.suffix == ".json":
        if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
            raise ConfigError(f"--tokenizer {path}: the file is no tokenizer.json; {POSSIBLE}.")
        return TokenizerSource("huggingface", path)
    if head[:1] != b"\n":  # the tag of the first field of sentencepiece's ModelProto
        raise ConfigError(f"--tokenizer {path}: the file is no sentencepiece model; {POSSIBLE}.")
    return TokenizerSource("sentencepiece", path)


def _main_file(folder: Path, given: str) -> Path:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"--tokenizer {given}: the folder holds neither tokenizer.json nor tokenizer.model; a tokenizer in an older "
        "format is converted by loading it with transformers and saving it again."
    )

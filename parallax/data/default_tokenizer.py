"""The default tokenizer: a sentencepiece BPE model trained on the embedded corpus at its first use on a machine.

It normalises nothing and falls back to bytes, so every text comes back exactly. Training runs on pieces of several
lines, not on single lines, so that line ends can become part of pieces: ":\\n" is one. The trainer runs in one thread
over the whole corpus (about 2 s), in the same order everywhere: the same corpus and the same sentencepiece give the
same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallax.data.cache import build_once, cache_folder, digest
from parallax.data.checksums import fingerprint_of
from parallax.data.corpus import Corpus, corpus_files, standard_library
from parallax.data.tokenizer_files import END_OF_TEXT
from parallax.errors import ConfigError

DEFAULT_VOCAB_SIZE = 4096
SENTENCE_CHARACTERS = 4096
SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": DEFAULT_VOCAB_SIZE,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,  # indentation
    "split_digits": True,
    "character_coverage": 0.9995,
    "max_sentence_length": 8 * SENTENCE_CHARACTERS,  # bytes
    "unk_id": 0,
    "eos_id": 1,
    "bos_id": -1,
    "pad_id": -1,
    "eos_piece": END_OF_TEXT,
    "control_symbols": ["<|im_start|>", "<|im_end|>"],  # so that ChatML, the default template, ends a turn by one token
    "num_threads": 1,
    "minloglevel": 2,
}


def default_model_file() -> Path:
    """Return the path of the default sentencepiece model, trained now if this machine has none yet."""
    import sentencepiece

    corpus = standard_library()
    settings = f"{sorted(SETTINGS.items())} {SENTENCE_CHARACTERS}"
    key = digest("default tokenizer", fingerprint_of(corpus_files(corpus)), settings, sentencepiece.__version__)

    def build(folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(train(corpus))

    folder = build_once(cache_folder() / f"tokenizer-{key}", build, "the default tokenizer")
    return folder / "tokenizer.model"


def train(corpus: Corpus) -> bytes:
    """Train a model on a corpus and return its bytes.

    Raises:
        ConfigError: the corpus is too small for the vocabulary.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(sentence_iterator=_sentences(corpus), model_writer=model, **SETTINGS)
    except RuntimeError as error:
        raise ConfigError(
            f"no tokenizer of {DEFAULT_VOCAB_SIZE} pieces can be trained on {corpus.description} "
            f"({str(error).strip()}); give --tokenizer."
        ) from error
    return model.getvalue()


def _sentences(corpus: Corpus) -> Iterator[str]:
    for file in corpus.files:
        with open(file.path, encoding="utf-8-sig", newline="") as stream:
            while text := stream.read(SENTENCE_CHARACTERS):
                yield text

"""The files with which `transformers` opens a tokenizer of ours and gives the same ids.

A sentencepiece BPE model merges the neighbours whose union has the best score; `tokenizers` merges by a ranked list of
pairs. The list is all ways to cut each piece into two pieces, in the order of the scores. Not every sentencepiece model
can be said so (unigram models, normalisation, user-defined symbols), so the result is compared with sentencepiece
itself, and a model that cannot be said exactly is saved as its .model alone: a folder that opens and gives other
ids than training saw would be worse than one that does not open.

Two differences remain, both of them usual: `transformers` reads the name of a special token inside a text as that token,
and reads U+2581, the character sentencepiece writes for a space, as a space.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as FastTokenizer

END_OF_TEXT = "<|endoftext|>"
SPACE_MARK = "\u2581"
PROBES = (
    "a",
    " a  b   c    d",
    "\n\n  two\r\n\tthree    \n",
    "        return self.name + other_names[10:2025]  # comment --------------------------------",
    "Ünïcödé ß ﬁ ① 漢字 かな 한글 😀 e\u0301 \u2028 \u00a0 \ufeff\x00",
    "The quick brown fox doesn't jump over 1,234.56 lazy dogs... (or so they say); ==========   ....",
)


def config_file(eos_token: str | None = None, bos_token: str | None = None, **more: Any) -> bytes:
    """Return a tokenizer_config.json for a tokenizer.json that stands beside it."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {key: token for key, token in (("eos_token", eos_token), ("bos_token", bos_token)) if token}
    return (json.dumps(config | more, indent=2) + "\n").encode()


def byte_files() -> dict[str, bytes]:
    """Return the files of the byte tokenizer: byte b is id b, the end of text is 256."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    fast = FastTokenizer(models.BPE(vocab={_visible(b): b for b in range(256)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([END_OF_TEXT])
    return {"tokenizer.json": _json_of(fast), "tokenizer_config.json": config_file(eos_token=END_OF_TEXT)}


def sentencepiece_files(processor: SentencePieceProcessor, model: bytes) -> dict[str, bytes]:
    """Return tokenizer.model, and the two files of `transformers` where they give the same ids."""
    files = {"tokenizer.model": model}
    for dummy_prefix in (False, True):
        fast = _as_fast_tokenizer(processor, dummy_prefix)
        if _same_ids(fast, processor):
            special = {"eos_token": processor.eos_id(), "bos_token": processor.bos_id()}
            tokens = {name: processor.id_to_piece(i) for name, i in special.items() if i >= 0}
            control = [processor.id_to_piece(i) for i in range(processor.get_piece_size()) if processor.is_control(i)]
            fast.add_special_tokens(list(dict.fromkeys([*tokens.values(), *control])))
            files |= {"tokenizer.json": _json_of(fast), "tokenizer_config.json": config_file(**tokens)}
            break
    return files


def _as_fast_tokenizer(processor: SentencePieceProcessor, dummy_prefix: bool) -> FastTokenizer:
    """Write a BPE model with byte fallback as pairs; `dummy_prefix`: a space is put before each text."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, normalizers

    vocab = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    plain = {piece: i for piece, i in vocab.items() if not _is_special(processor, i)}
    best_first = sorted(plain, key=lambda piece: (-processor.get_score(plain[piece]), plain[piece]))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=False))
    mark_spaces: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
    unmark_spaces: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        mark_spaces.insert(0, normalizers.Prepend(SPACE_MARK))
        unmark_spaces.append(decoders.Strip(" ", 1, 0))
    fast.normalizer = normalizers.Sequence(mark_spaces)
    fast.decoder = decoders.Sequence(unmark_spaces)
    return fast


def _same_ids(fast: FastTokenizer, processor: SentencePieceProcessor) -> bool:
    pieces = (processor.id_to_piece(i) for i in range(processor.get_piece_size()) if not _is_special(processor, i))
    texts = [*PROBES, *(piece.replace(SPACE_MARK, " ") for piece in pieces)]
    encoded = fast.encode_batch(texts, add_special_tokens=False)
    return all(one.ids == ids for one, ids in zip(encoded, processor.encode(texts), strict=True))


def _is_special(processor: SentencePieceProcessor, i: int) -> bool:
    return bool(processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i) or processor.is_unused(i))


def _visible(byte: int) -> str:
    """Return the character that stands for a byte in byte-level vocabularies (GPT-2's table).

    Printable bytes stand for themselves, the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(other not in printable for other in range(byte)))


def _json_of(fast: FastTokenizer) -> bytes:
    return fast.to_str(pretty=True).encode()

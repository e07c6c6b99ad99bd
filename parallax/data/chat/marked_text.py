"""A written chat as ids, and the characters that each id was made from: the same ids that `transformers` gives.

    text       <|im_end|> \\n            where the vocabulary has the marker            <|im_end|> \\n    two tokens
                                        where it has not, and joins > with a line end  <|im_end| >\\n   the last holds both

The text is tokenized whole, since that is what everybody does who writes a chat by its template and tokenizes it: an end of turn
that was encoded alone would be other ids than those that the model reads later. A special token's name is that token wherever it
stands, in what a user says too. Which tokens are the assistant's is told by characters, never by ids.

A sentencepiece model that cannot be said in the files of `transformers` encodes for itself, and part by part: header, content, end
of turn. Sentencepiece tells offsets in other ways from version to version, and nobody else reads these models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from parallax.data.tokenizers import Tokenizer

Encode = Callable[[Sequence[str]], tuple[list[int], np.ndarray]]
"""The parts of a text to ids and int64 `[tokens, 2]`: half-open, the characters of each, or the part that it is of."""


def encoder_of(tokenizer: Tokenizer) -> Encode:
    """Return what encodes as `transformers` does with the files that the tokenizer saves, or for itself where there are none."""
    files = tokenizer.files()
    if "tokenizer.json" in files:
        return with_fast_tokenizer(files["tokenizer.json"].decode())
    return _with_sentencepiece(files["tokenizer.model"])


def with_fast_tokenizer(json: str) -> Encode:
    """Return what encodes with a tokenizer.json, and takes no spaces out of the offsets, as some post-processors do.

    A token that swallows the white space beside it (lstrip, rstrip) stands where its name does.
    """
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_str(json)
    fast.post_processor = None
    fast.no_truncation()
    fast.no_padding()
    swallowing = {
        i: token.content for i, token in fast.get_added_tokens_decoder().items() if token.lstrip or token.rstrip
    }

    def encode(parts: Sequence[str]) -> tuple[list[int], np.ndarray]:
        text = "".join(parts)
        encoded = fast.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        for k in np.flatnonzero(np.isin(encoded.ids, list(swallowing))) if swallowing else ():
            start, stop = offsets[k]
            name = swallowing[encoded.ids[k]]
            at = text.find(name, start, stop)
            if at >= 0:  # else a normalizer has rewritten it
                offsets[k] = at, at + len(name)
        return list(encoded.ids), offsets

    return encode


def _with_sentencepiece(model: bytes) -> Encode:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=model)
    ids_of = {processor.id_to_piece(i): i for i in range(processor.get_piece_size()) if processor.is_control(i)}
    longest_first = sorted(ids_of, key=lambda name: (-len(name), name))
    names = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def encode(parts: Sequence[str]) -> tuple[list[int], np.ndarray]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for part in parts:
            for piece in filter(None, names.split(part)):
                ids += [ids_of[piece]] if piece in ids_of else processor.encode(piece)
            offsets += [(start, start + len(part))] * (len(ids) - len(offsets))
            start += len(part)
        return ids, np.array(offsets, dtype=np.int64).reshape(-1, 2)

    return encode


def tokens_touching(offsets: np.ndarray, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return, for each half-open range of characters, that of the tokens of which any character is in it; (0, 0): there is none.

    offsets: int64 `[tokens, 2]`. A token of no character, such as the first bytes of one, counts as the one that it stands at.
    """
    first, last = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    found = (np.flatnonzero((first < stop) & (last > start)) for start, stop in places)
    return [(int(touching[0]), int(touching[-1]) + 1) if len(touching) else (0, 0) for touching in found]

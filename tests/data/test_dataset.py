from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.data.dataset import Borders, TokenDataset
from parallax.data.stream import TokenStream
from parallax.errors import ConfigError
from tests.data.streams import store_of, stream_of


def test_windows_overlap_by_one_token_and_never_wrap() -> None:
    data = TokenDataset(stream_of(12), [(0, 12)], seq_len=3)
    assert [data[i].tolist() for i in range(len(data))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert data[0].dtype == np.int64
    with pytest.raises(IndexError):
        data[3]


@st.composite
def streams(draw: st.DrawFn) -> tuple[TokenStream, np.ndarray, list[int]]:
    """Return a stream of up to three stores, its tokens, and where its documents start."""
    stores, tokens, starts = [], [], []
    for k, dtype in enumerate(draw(st.lists(st.sampled_from([np.uint16, np.int64, np.int32]), min_size=1, max_size=3))):
        length = draw(st.integers(1, 60))
        own = sorted({0, *draw(st.lists(st.integers(0, length - 1), max_size=6))})
        own += [own[-1]] * draw(st.integers(0, 1))  # an empty document
        stores.append(store_of((np.arange(length) + 100 * k).astype(dtype), own, str(k)))
        starts += [sum(map(len, tokens)) + start for start in own]
        tokens.append(stores[-1].tokens)
    return TokenStream(stores), np.concatenate(tokens), starts


@given(streams(), st.data(), st.integers(1, 12))
def test_samples_are_windows_of_the_ranges_put_together(
    drawn: tuple[TokenStream, np.ndarray, list[int]], data: st.DataObject, seq_len: int
) -> None:
    stream, tokens, document_starts = drawn
    marks = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    ranges = list(zip(marks[::2], marks[1::2], strict=False))
    kept = [position for start, stop in ranges for position in range(start, stop)]
    if len(kept) < seq_len + 1:
        with pytest.raises(ConfigError, match="--seq-len"):
            TokenDataset(stream, ranges, seq_len)
        return
    plain = TokenDataset(stream, ranges, seq_len)
    bordered = TokenDataset(stream, ranges, seq_len, Borders(documents=True, positions=True))
    assert len(plain) == len(bordered) == (len(kept) - 1) // seq_len
    assert plain.fingerprint == bordered.fingerprint
    for i in range(len(plain)):
        positions = kept[i * seq_len : i * seq_len + seq_len + 1]
        assert plain[i].tolist() == bordered[i]["window"].tolist() == tokens[positions].tolist()
        document, place = 0, 0
        for t in range(seq_len):
            # A plain loop over the tokens: a document begins at its start, and after a gap.
            if t and (positions[t] in document_starts or positions[t] != positions[t - 1] + 1):
                document, place = document + 1, 0
            assert (bordered[i]["documents"][t], bordered[i]["positions"][t]) == (document, place)
            place += 1


@given(streams(), st.integers(0, 200))
def test_documents_are_found_in_any_store(drawn: tuple[TokenStream, np.ndarray, list[int]], at: int) -> None:
    stream, tokens, starts = drawn
    at %= len(tokens)
    assert stream.num_tokens == len(tokens) and stream.num_documents == len(starts)
    assert stream.document_before(at) == max(start for start in starts if start <= at)
    assert stream.document_starts(at, len(tokens)).tolist() == sorted({start for start in starts if start >= at})
    assert [stream.start_of_document(n) for n in range(len(starts) + 1)] == [*starts, len(tokens)]


def test_the_stream_the_ranges_and_the_length_are_part_of_the_fingerprint() -> None:
    two = [store_of(np.arange(50), fingerprint="a"), store_of(np.arange(50), fingerprint="b")]
    prints = {
        TokenDataset(TokenStream(stores), ranges, seq_len).fingerprint
        for stores in (two, two[::-1], two[:1])
        for ranges in ([(0, 40)], [(0, 41)], [(0, 20), (21, 41)])
        for seq_len in (8, 16)
    }
    assert len(prints) == 18


def test_positions_beyond_two_to_the_31_are_read_exactly(tmp_path: Path) -> None:
    """Megatron-LM 1672, 1056: 32-bit positions wrap. The file is sparse and takes a few KiB of disk."""
    path = tmp_path / "tokens.bin"
    n = 2**31 + 5000
    last = np.arange(1, 41, dtype="<u2")
    with open(path, "wb") as stream:
        stream.truncate(2 * n)
        stream.seek(2 * (n - len(last)))
        stream.write(last.tobytes())
    assert path.stat().st_blocks * 512 < 1 << 20
    one = store_of(np.memmap(path, dtype="<u2", mode="r"), [0, n - 3])
    tokens = TokenStream([one, one])
    assert len(TokenDataset(tokens, [(0, 100), (n - 2**31, n)], seq_len=39)) == (2**31 + 99) // 39
    borders = Borders(documents=True)
    for stop in (n, 2 * n):  # the last sample ends the file, once and twice
        data = TokenDataset(tokens, [((stop - 1) % 39, stop)], 39, borders)
        sample = data[len(data) - 1]
        assert sample["window"].tolist() == last.tolist()
        assert sample["documents"].tolist() == [0] * 37 + [1] * 2
    assert tokens.document_before(2 * n - 1) == 2 * n - 3 and tokens.document_before(2 * n - 4) == n
    path.unlink()

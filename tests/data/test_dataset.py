from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.data.dataset import TokenDataset, held_out_ranges, split
from parallax.data.token_store import TokenStore
from parallax.errors import ConfigError


def store_of(num_tokens: int, document_starts: list[int] | None = None) -> TokenStore:
    starts = np.array([*(document_starts or [0]), num_tokens], dtype=np.int64)
    return TokenStore(np.arange(num_tokens, dtype=np.uint32), starts, "made up")


def test_windows_overlap_by_one_token_and_never_wrap() -> None:
    data = TokenDataset(np.arange(12, dtype=np.uint16), [(0, 12)], seq_len=3, source="s")
    assert [data[i].tolist() for i in range(len(data))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert data[0].dtype == np.int64
    with pytest.raises(IndexError):
        data[3]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 8))
def test_a_stream_is_the_concatenation_of_its_ranges(gaps: list[tuple[int, int]], seq_len: int) -> None:
    tokens = np.arange(200, dtype=np.uint16) * 3
    ranges, at = [], 0
    for gap, length in gaps:
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    stream = np.concatenate([tokens[a:b] for a, b in ranges])
    if len(stream) < seq_len + 1:
        with pytest.raises(ConfigError, match="--seq-len"):
            TokenDataset(tokens, ranges, seq_len, "s")
        return
    data = TokenDataset(tokens, ranges, seq_len, "s")
    assert len(data) == (len(stream) - 1) // seq_len
    for i in range(len(data)):
        assert data[i].tolist() == stream[i * seq_len : i * seq_len + seq_len + 1].tolist()


@given(st.data(), st.integers(20, 2000), st.integers(1, 9), st.floats(0.001, 0.5))
def test_every_token_is_either_trained_on_or_held_out(data: st.DataObject, n: int, seq_len: int, share: float) -> None:
    starts = sorted({0, *data.draw(st.lists(st.integers(0, n - 1), max_size=20))})
    ranges = held_out_ranges(np.array([*starts, n]), n, seq_len, share)
    assert all(0 <= a < b <= n for a, b in ranges)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
    held_out = sum(b - a for a, b in ranges)
    target = max(int(n * share), seq_len + 1)
    assert seq_len + 1 <= held_out and target - len(ranges) < held_out <= target
    train, evaluation = split(store_of(n, starts), seq_len, share)
    assert evaluation is not None
    assert evaluation.num_tokens == held_out and train.num_tokens == n - held_out


def test_held_out_stretches_start_with_a_document_where_one_is_near() -> None:
    ranges = held_out_ranges(np.array([0, 40, 995, 1990, 32000]), 32000, 3, 0.01)
    assert len(ranges) == 16 and ranges[0] == (995, 1015)


def test_the_split_and_the_length_of_samples_are_part_of_the_fingerprint() -> None:
    prints = {split(store_of(5000), n, share)[0].fingerprint for n in (8, 16) for share in (0, 0.01, 0.1)}
    assert len(prints) == 6
    assert split(store_of(5000), 8, 0.1)[0].fingerprint == split(store_of(5000), 8, 0.1)[0].fingerprint


def test_nothing_is_held_out_when_nothing_is_asked_for() -> None:
    train, evaluation = split(store_of(9), 8, 0)
    assert evaluation is None and len(train) == 1


def test_too_little_data_says_how_much_there_is_and_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens, but --seq-len 8 needs 18 .*--eval-fraction 0"):
        split(store_of(17), 8, 0.01)
    train, evaluation = split(store_of(18), 8, 0.01)
    assert evaluation is not None and len(train) == len(evaluation) == 1
    with pytest.raises(ConfigError, match=r"8 tokens, but --seq-len 8 needs 9 "):
        split(store_of(8), 8, 0)


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
    tokens = np.memmap(path, dtype="<u2", mode="r")
    data = TokenDataset(tokens, [(0, 100), (n - 2**31, n)], seq_len=39, source="s")
    assert len(data) == (2**31 + 99) // 39
    whole = TokenDataset(tokens, [(n % 39 + 38, n)], seq_len=39, source="s")  # its last sample ends the file
    assert whole[len(whole) - 1].tolist() == last.tolist()
    path.unlink()

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.data.sources import parse_shares
from parallax.data.split import held_out_ranges, hold_out, split_documents
from parallax.data.stream import TokenStream
from parallax.errors import ConfigError
from tests.data.streams import store_of, stream_of


@given(st.data(), st.integers(20, 2000), st.integers(1, 9), st.floats(0.001, 0.5))
def test_every_token_is_either_trained_on_or_held_out(data: st.DataObject, n: int, seq_len: int, share: float) -> None:
    starts = sorted({0, *data.draw(st.lists(st.integers(0, n - 1), max_size=20))})
    stream = stream_of(n, starts)
    ranges = held_out_ranges(stream.document_before, n, seq_len, share)
    assert all(0 <= a < b <= n for a, b in ranges)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
    held_out = sum(b - a for a, b in ranges)
    target = max(int(n * share), seq_len + 1)
    assert seq_len + 1 <= held_out and target - len(ranges) < held_out <= target
    split = hold_out(stream, seq_len, share)
    assert split.eval is not None and split.test is None
    assert split.eval.num_tokens == held_out and split.train.num_tokens == n - held_out


def test_held_out_stretches_start_with_a_document_where_one_is_near() -> None:
    stream = stream_of(32000, [0, 40, 995, 1990])
    ranges = held_out_ranges(stream.document_before, 32000, 3, 0.01)
    assert len(ranges) == 16 and ranges[0] == (995, 1015)


def test_the_split_and_the_length_of_samples_are_part_of_the_fingerprint() -> None:
    prints = {hold_out(stream_of(5000), n, share).train.fingerprint for n in (8, 16) for share in (0, 0.01, 0.1)}
    assert len(prints) == 6
    assert hold_out(stream_of(5000), 8, 0.1).train.fingerprint == hold_out(stream_of(5000), 8, 0.1).train.fingerprint


def test_nothing_is_held_out_when_nothing_is_asked_for() -> None:
    split = hold_out(stream_of(9), 8, 0)
    assert split.eval is None and len(split.train) == 1


def test_too_little_data_says_how_much_there_is_and_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens, but --seq-len 8 needs 18 .*--eval-fraction 0"):
        hold_out(stream_of(17), 8, 0.01)
    split = hold_out(stream_of(18), 8, 0.01)
    assert split.eval is not None and len(split.train) == len(split.eval) == 1
    with pytest.raises(ConfigError, match=r"8 tokens, but --seq-len 8 needs 9 "):
        hold_out(stream_of(8), 8, 0)


@given(st.lists(st.integers(5, 30), min_size=8, max_size=60), st.tuples(*[st.integers(0, 20)] * 3))
def test_whole_documents_in_their_order_go_to_training_validation_and_test(
    lengths: list[int], shares: tuple[int, int, int]
) -> None:
    starts = [0, *itertools.accumulate(lengths)]
    stream = stream_of(starts.pop(), starts)
    text = ",".join(map(str, shares))
    if not shares[0]:
        with pytest.raises(ConfigError, match="the first above 0"):
            parse_shares(text)
        return
    # What Megatron-LM does, in floats: a document belongs to a part by the rounded share of all documents before it.
    ends = [round(sum(shares[:k]) / sum(shares) * len(lengths)) for k in range(4)]
    expected = [[n for n in range(a, b)] for a, b in itertools.pairwise(ends)]
    if any(share and not documents for share, documents in zip(shares, expected, strict=True)):
        with pytest.raises(ConfigError, match=rf"--split gives 0 tokens of {stream.num_tokens:,} to"):
            split_documents(stream, 4, parse_shares(text))
        return
    split = split_documents(stream, 4, parse_shares(text))
    for part, share, documents in zip((split.train, split.eval, split.test), shares, expected, strict=True):
        assert (part is None) == (not share)
        if part is not None:
            assert part.num_tokens == sum(lengths[n] for n in documents)
            assert part[0].tolist() == list(range(starts[documents[0]], starts[documents[0]] + 5))


def test_a_split_goes_over_all_stores_of_a_source() -> None:
    stores = [store_of(np.arange(40), range(0, 40, 10)), store_of(np.arange(60), range(0, 60, 10))]
    split = split_documents(TokenStream(stores), 9, parse_shares("50,30,20"))
    assert [part.num_tokens for part in (split.train, split.eval, split.test) if part] == [50, 30, 20]
    assert split.eval is not None and split.eval[0].tolist() == list(range(10, 20))


@pytest.mark.parametrize("text", ["", "98", "0,1,1", "98,1,1,1", "98,-1,1", "98;1;1", "a,b", "1/0,1"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--split .* must be two or three numbers"):
        parse_shares(text)


def test_shares_need_not_sum_to_one_hundred() -> None:
    assert parse_shares("969,30,1") == [Fraction(969, 1000), Fraction(30, 1000), Fraction(1, 1000)]
    assert parse_shares("0.9, 0.1") == [Fraction(9, 10), Fraction(1, 10), 0]

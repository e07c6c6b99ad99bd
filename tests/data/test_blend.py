from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.data.blend import BlendedDataset, BlendOrder, samples_per_period, schedule_period
from parallax.data.dataset import TokenDataset
from parallax.data.loader import BatchLoader
from parallax.data.order import DataOrder
from parallax.data.stream import TokenStream
from tests.data.streams import store_of


def data(name: str, num_samples: int) -> TokenDataset:
    """Return samples whose first token is 2i, for sample i."""
    store = store_of(np.arange(2 * num_samples + 1), fingerprint=name)
    return TokenDataset(TokenStream([store]), [(0, 2 * num_samples + 1)], 2)


def blend(*parts: tuple[str, int, str]) -> BlendedDataset:
    return BlendedDataset([data(name, n) for name, n, _ in parts], [Fraction(weight) for *_, weight in parts])


def worst_error(sources: np.ndarray, shares: list[Fraction]) -> float:
    """Return how far any source ever is from its share, in samples, at any prefix."""
    n = np.arange(1, len(sources) + 1)
    return max(
        np.abs(np.cumsum(sources == k) * share.denominator - n * share.numerator).max() / share.denominator
        for k, share in enumerate(shares)
    )


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=12))
def test_at_every_prefix_each_source_has_given_its_share_to_less_than_one_sample(weights: list[int]) -> None:
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    table = schedule_period(samples_per_period(shares))
    assert worst_error(np.concatenate([table, table]), shares) < 1


@pytest.mark.parametrize(
    "weights",
    [
        "0.001 0.999",
        "0.7 0.3",
        "1e-6 0.999999",
        "0.9 " + "0.01 " * 10,
        "0.3 0.3 0.3 " + "0.01 " * 10,
        "0.249 0.249 0.249 0.249 0.004",
    ],
)
def test_weights_far_apart_are_exact_too(weights: str) -> None:
    given = [Fraction(word) for word in weights.split()]
    shares = [weight / sum(given) for weight in given]
    counts = samples_per_period(given)
    assert [Fraction(count, sum(counts)) for count in counts] == shares
    assert worst_error(np.tile(schedule_period(counts), 2), shares) < 1


@given(st.lists(st.floats(1e-9, 1), min_size=2, max_size=20))
def test_shares_without_a_common_denominator_are_taken_to_the_millionth(weights: list[float]) -> None:
    given = [Fraction(weight) for weight in weights]
    counts = samples_per_period(given)
    assert min(counts) >= 1
    if sum(counts) == 10**6:
        for count, weight in zip(counts, given, strict=True):
            assert abs(count - weight / sum(given) * 10**6) <= len(weights)


def test_the_millionths_sum_to_a_million() -> None:
    thirds = samples_per_period([Fraction("0.3333333333"), Fraction("0.6666666667")])
    assert thirds == [333333, 666667]
    assert sum(samples_per_period([Fraction("1e-12"), Fraction("0.123456789"), Fraction("0.9")])) == 10**6


def test_each_source_of_a_blend_has_the_order_that_it_would_have_alone() -> None:
    mix = blend(("a", 20, "0.7"), ("b", 7, "0.3"))
    order = BlendOrder(3, mix)
    seen = order.samples(0, 100)
    ours = {0: seen[seen < 20], 1: seen[seen >= 20] - 20}
    for k, source in enumerate(mix.sources):
        alone = DataOrder(3, source.fingerprint, len(source))
        assert len(ours[k]) == (70, 30)[k]
        assert ours[k].tolist() == alone.samples(0, len(ours[k])).tolist()


@given(st.integers(0, 10**12), st.integers(0, 60), st.integers(0, 3))
def test_a_position_is_a_pure_function_however_it_is_asked_for(first: int, count: int, seed: int) -> None:
    mix = blend(("a", 5, "0.55"), ("b", 9, "0.25"), ("c", 2, "0.2"))
    together = BlendOrder(seed, mix).samples(first, count)
    assert together.dtype == np.int64
    assert together.tolist() == [int(BlendOrder(seed, mix).samples(first + i, 1)[0]) for i in range(count)]


@pytest.mark.parametrize("parts", [(("a", 20, "0.7"), ("b", 7, "0.3")), (("a", 3, "1"), ("b", 2, "2"), ("c", 9, "1"))])
def test_a_blend_without_shuffling_ends_where_a_sample_would_come_again(
    parts: tuple[tuple[str, int, str], ...],
) -> None:
    mix = blend(*parts)
    order = BlendOrder(0, mix, shuffle=False)
    seen = order.samples(0, order.num_samples + 1).tolist()
    assert len(set(seen)) == order.num_samples and seen[-1] in seen[:-1]
    loader = BatchLoader(mix, 0, 4, 2, shuffle=False)
    labels = [
        batch["labels"].tolist() for step in range(loader.steps_per_epoch + 1) for batch in loader.micro_batches(step)
    ]
    assert sum(row != [-100, -100] for batch in labels for row in batch) == order.num_samples


def test_samples_are_numbered_through() -> None:
    mix = blend(("a", 3, "1"), ("b", 2, "1"))
    assert len(mix) == 5 and [int(mix[i][0]) for i in range(5)] == [0, 2, 4, 0, 2]
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            mix[wrong]


def test_sources_and_weights_are_part_of_the_fingerprint_and_their_scale_is_not() -> None:
    a, b = ("a", 5, "0.5"), ("b", 5, "0.5")
    prints = [blend(*parts).fingerprint for parts in ((a, b), (b, a), (a, ("b", 5, "0.4")), (a, ("c", 5, "0.5")))]
    assert len(set(prints)) == 4
    assert blend(("a", 5, "7"), ("b", 5, "7")).fingerprint == prints[0]


def test_every_layout_trains_on_the_same_samples_of_a_blend_in_each_step() -> None:
    mix = blend(("a", 40, "0.7"), ("b", 30, "0.3"))

    def labels(dp: int, micro_batch: int, step: int) -> list[list[int]]:
        loaders = [BatchLoader(mix, 5, 24, micro_batch, rank, dp) for rank in range(dp)]
        return sorted(
            row for loader in loaders for batch in loader.micro_batches(step) for row in batch["labels"].tolist()
        )

    for step in (0, 3, 100):
        for dp, micro_batch in ((2, 1), (3, 2), (4, 2)):
            assert labels(dp, micro_batch, step) == labels(1, 1, step)

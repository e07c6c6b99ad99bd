"""The simulator against independently simulated records and closed forms."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.pipeline import SCHEDULES, Action, Costs, Pair, Schedule, make_schedule, simulate

RECORDS = json.loads((Path(__file__).parents[1] / "oracles" / "schedules.json").read_text())["records"]


NAMES = {
    "interleaved_v2": ("interleaved", 2),
    "interleaved_v4": ("interleaved", 4),
    "zb_h1": ("zb-h1", None),
    "zb_v": ("zb-v", None),
    "dualpipe_v": ("dualpipev", None),
}


def made(record: dict) -> Schedule:
    name, chunks = NAMES.get(record["schedule"], (record["schedule"], None))
    return make_schedule(name, record["P"], record["M"], chunks)


@pytest.mark.parametrize("name", sorted({record["schedule"] for record in RECORDS}))
def test_every_record_is_met_exactly(name: str) -> None:
    records = [record for record in RECORDS if record["schedule"] == name]
    assert len(RECORDS) == 216 and len(records) in (24, 36)
    for record in records:
        costs = Costs(record["F"], record["I"], record["W"], pair=record["FB"])
        played = simulate(made(record), costs)
        assert played.makespan == record["makespan"]
        assert list(played.bubble) == record["bubble_per_rank"]
        assert list(played.peak_in_flight) == record["peak_inflight"]


costs_in_quarters = st.builds(
    lambda f, i, w, saved: Costs(f / 4, i / 4, w / 4, pair=(f + i + w) / 4 - saved * min(f, i + w) / 4),
    *[st.integers(1, 12)] * 3,
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]), costs=costs_in_quarters, rounds=st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_the_bubble_of_schedules_without_pairs_is_its_closed_form(name: str, costs: Costs, rounds: int) -> None:
    ranks = 4
    played = simulate(make_schedule(name, ranks, ranks * rounds), costs)
    f, i, w = costs.forward, costs.input_gradient, costs.weight_gradient
    expected = (ranks - 1) * (f + i + (w if name != "zb-h1" else -min(f, i, w)))
    assert played.bubble == (expected,) * ranks


@given(
    name=st.sampled_from(["dualpipe", "dualpipev"]),
    middle=st.integers(1, 4),
    more=st.integers(0, 5),
    costs=costs_in_quarters,
)
@settings(max_examples=60, deadline=None)
def test_the_bubble_of_dualpipe_is_its_closed_form_at_every_distance_from_the_middle(
    name: str, middle: int, more: int, costs: Costs
) -> None:
    f, i, w, pair = costs.forward, costs.input_gradient, costs.weight_gradient, costs.pair
    assert pair is not None
    each_way = 2 * middle + more
    ranks, micro_batches = (2 * middle, 2 * each_way) if name == "dualpipe" else (middle, each_way)
    played = simulate(make_schedule(name, ranks, micro_batches), costs)
    worst = (middle - 1) * (pair + max(f, i) - w - min(i, w)) - (i > f) * min(f, (middle - 1) * (i - f))

    def pairs(hops: int) -> int:
        return 2 * each_way - 3 * middle + hops + 1 - (hops == middle - 1)

    for rank in range(ranks):
        hops = min(rank, ranks - 1 - rank) if name == "dualpipe" else rank
        expected = worst - (pairs(middle - 1) - pairs(hops)) * (f + i + w - pair)
        assert played.bubble[rank] == pytest.approx(expected, abs=1e-9)
    if f == i >= w:
        assert max(played.bubble) == pytest.approx((middle - 1) * (pair + i + w - 3 * w), abs=1e-9)


@pytest.mark.parametrize(("name", "extra"), [("interleaved", 30), ("zb-h1", 28), ("zb-v", 33), ("dualpipe", 37)])
def test_what_a_latency_costs_the_others_does_not_grow_with_micro_batches_but_for_dualpipe(
    name: str, extra: int
) -> None:
    def with_latency(latency: float) -> float:
        return simulate(make_schedule(name, 8, 32), Costs(latency=latency)).makespan

    assert with_latency(0.125) - with_latency(0) == pytest.approx(extra * 0.125)


def test_the_size_of_a_stage_scales_its_actions_and_bounds_what_a_pair_gains() -> None:
    costs = Costs(1, 1, 1, pair=2.5, sizes=(1, 3))
    assert costs.of(Action("B", 1, 0)) == 6 and costs.of(Action("F", 0, 0)) == 1
    assert costs.of(Pair(Action("F", 0, 1), Action("B", 1, 0))) == 1 + 6 - 0.5
    assert Costs(1, 1, 1).of(Pair(Action("F", 0, 1), Action("B", 1, 0))) == 3


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (4, 12), (8, 16), (8, 64)])
def test_a_slow_link_costs_1f1b_nearly_two_latencies_per_micro_batch(stages: int, micro_batches: int) -> None:
    latency = 0.25
    without = simulate(SCHEDULES["1f1b"](stages, micro_batches)).makespan
    with_it = simulate(SCHEDULES["1f1b"](stages, micro_batches), Costs(latency=latency)).makespan
    expected = latency * (2 * (stages - 1) * micro_batches / stages + 2 * (stages - 2))
    assert with_it - without == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (4, 13), (8, 16), (8, 64)])
@pytest.mark.parametrize("latency", [0.25, 1.0, 1.5])
def test_a_slow_link_costs_eager_1f1b_one_latency_a_hop_and_direction(
    stages: int, micro_batches: int, latency: float
) -> None:
    schedule = make_schedule("1f1b-eager", stages, micro_batches)
    assert simulate(schedule).bubble == (3 * (stages - 1),) * stages
    played = simulate(schedule, Costs(latency=latency))
    assert played.makespan - simulate(schedule).makespan == pytest.approx(2 * (stages - 1) * latency)
    assert played.peak_in_flight == tuple(min(micro_batches, 2 * (stages - 1 - rank) + 1) for rank in range(stages))


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "pair", "chunks", "makespan"),
    [
        (8, 32, 3.0, 2, 106.5),
        (8, 32, 3.0, 4, 101.25),
        (8, 32, 2.5, 2, 92.75),
        (8, 32, 2.5, 4, 88.375),
        (8, 32, 2.0, 2, 79),
        (8, 32, 2.0, 4, 75.5),
        (16, 64, 2.5, 2, 186.75),
        (16, 64, 2.5, 4, 177.375),
    ],
)
def test_paired_interleaved_takes_the_time_that_others_simulated(
    ranks: int, micro_batches: int, pair: float, chunks: int, makespan: float
) -> None:
    schedule = make_schedule("interleaved-paired", ranks, micro_batches, chunks)
    played = simulate(schedule, Costs(1 / chunks, 1 / chunks, 1 / chunks, pair=pair / chunks))
    assert played.makespan == pytest.approx(makespan)
    assert max(played.peak_in_flight) == (1.5 if chunks == 2 else 1.25) * ranks * chunks


def test_gpipe_pays_a_latency_per_hop() -> None:
    without = simulate(SCHEDULES["gpipe"](4, 32)).makespan
    assert simulate(SCHEDULES["gpipe"](4, 32), Costs(latency=0.5)).makespan == without + 6 * 0.5


def test_stages_of_one_rank_hand_over_without_latency() -> None:
    order = tuple(Action(kind, stage, 0) for kind, stage in [("F", 0), ("F", 1), ("B", 1), ("B", 0)])
    schedule = Schedule("chunks", 2, 1, 1, (order,), ((0, 0),))
    played = simulate(schedule, Costs(latency=100.0))
    assert played.makespan == 6 and played.peak_in_flight == (2,)


def test_a_table_that_cannot_end_names_the_action_of_each_stuck_rank() -> None:
    F, B = (lambda stage: Action("F", stage, 0)), (lambda stage: Action("B", stage, 0))
    schedule = Schedule("crossed", 2, 2, 1, ((B(0), F(0)), (F(1), B(1))), ((0, 1),))
    with pytest.raises(
        ConfigError, match=r"rank 0, position 0: 0B0 waits for 0F0; rank 1, position 0: 1F0 waits for 0F0"
    ):
        simulate(schedule)

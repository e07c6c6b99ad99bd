"""The simulator against independently simulated records and closed forms."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.pipeline import (
    ALL_SCHEDULES,
    SCHEDULES,
    Action,
    Costs,
    Memory,
    Pair,
    Schedule,
    check_schedule,
    make_schedule,
    simulate,
)
from parallax.pipeline.tables import parse_csv

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


def test_costs_of_each_stage_are_its_own_and_a_pair_gains_what_the_lesser_does() -> None:
    costs = Costs(forward=(1, 3), input_gradient=(0, 3), weight_gradient=(2, 3), pair=(2.75, 7.5))
    assert costs.of(Action("B", 1, 0)) == 6 and costs.of(Action("F", 0, 0)) == 1 and costs.of(Action("I", 0, 0)) == 0
    assert costs.of(Pair(Action("F", 0, 1), Action("B", 1, 0))) == 1 + 6 - 0.25
    assert costs.of(Pair(Action("F", 1, 1), Action("B", 1, 0))) == 7.5
    assert Costs(1, 1, 1).of(Pair(Action("F", 0, 1), Action("B", 1, 0))) == 3
    with pytest.raises(ConfigError, match="F is given for 2 stages and there are 3; give one number, or one for each"):
        simulate(make_schedule("gpipe", 3, 2), costs)


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


def in_flight_of(name: str, ranks: int, micro_batches: int, rank: int, chunks: int) -> int:
    """Return the closed form, as published with the records."""
    return {
        "gpipe": micro_batches,
        "1f1b": min(micro_batches, ranks - rank),
        "zb-h1": min(micro_batches, ranks - rank),
        "interleaved": min(micro_batches * chunks, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1),
        "zb-v": 2 * ranks,
        "dualpipe": ranks + 1,
        "dualpipev": 2 * ranks + 1,
    }[name]


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe", "dualpipev"]),
    half=st.integers(1, 5),
    rounds=st.integers(0, 3),
    chunks=st.integers(2, 5),
    costs=costs_in_quarters,
)
@settings(max_examples=80, deadline=None)
def test_micro_batches_in_flight_are_their_closed_forms_whatever_actions_cost(
    name: str, half: int, rounds: int, chunks: int, costs: Costs
) -> None:
    ranks, micro_batches = 2 * half, 2 * half * (2 + rounds)
    schedule = make_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else None)
    expected = tuple(in_flight_of(name, ranks, micro_batches, rank, chunks) for rank in range(ranks))
    assert simulate(schedule, costs).peak_in_flight == expected
    if name in ("1f1b", "zb-h1", "gpipe"):
        few = simulate(make_schedule(name, ranks, half), costs).peak_in_flight
        assert few == tuple(in_flight_of(name, ranks, half, rank, 1) for rank in range(ranks))


@given(ranks=st.integers(1, 8), more=st.integers(0, 9), unit=st.sampled_from([0.25, 1.0, 3.0]))
@settings(max_examples=40, deadline=None)
def test_zb_v_waits_only_before_its_first_and_after_its_last_action_if_all_take_as_long(
    ranks: int, more: int, unit: float
) -> None:
    schedule = make_schedule("zb-v", ranks, 2 * ranks + more)
    played = simulate(schedule, Costs(unit, unit, unit))
    assert played.bubble == ((ranks - 1) * unit,) * ranks
    for rank, busy in enumerate(played.busy):
        actions = list(schedule.actions_of(rank))
        assert played.ends[actions[-1]] - played.starts[actions[0]] == busy


@given(middle=st.integers(1, 4), more=st.integers(0, 5), costs=costs_in_quarters)
@settings(max_examples=40, deadline=None)
def test_the_makespan_of_dualpipe_is_its_closed_form(middle: int, more: int, costs: Costs) -> None:
    each_way = 2 * middle + more
    both = costs.forward + costs.input_gradient + costs.weight_gradient
    for name, ranks, micro_batches in [("dualpipe", 2 * middle, 2 * each_way), ("dualpipev", middle, each_way)]:
        played = simulate(make_schedule(name, ranks, micro_batches), costs)
        paired = (2 * each_way - 2 * middle - 1) * (both - costs.pair)
        assert played.makespan == pytest.approx(2 * each_way * both - paired + max(played.bubble))


def test_messages_of_one_link_leave_one_after_the_other_and_those_of_others_at_the_same_time() -> None:
    # Rank 0 makes two results at 1 and 2, each takes 3 to leave and 0.5 to arrive; the way back is another link.
    schedule = make_schedule("gpipe", 2, 2)
    played = simulate(schedule, Costs(latency=0.5, message_bytes=6, bandwidth=2))
    F0, F1, B0, B1 = (Action(kind, stage, number) for kind, stage in [("F", 0), ("B", 1)] for number in (0, 1))
    assert [played.arrivals[action] for action in (F0, F1)] == [4.5, 7.5]
    assert played.starts[Action("F", 1, 1)] == 7.5 and played.starts[B0] == 8.5
    assert [played.arrivals[action] for action in (B0, B1)] == [14.0, 17.0] and played.makespan == 19
    # Both directions at once: rank 1 of 1f1b sends a gradient while an activation is on its way to it.
    both = simulate(make_schedule("1f1b", 2, 3), Costs(message_bytes=1, bandwidth=1))
    assert both.arrivals[Action("F", 0, 1)] == 3 and both.arrivals[Action("B", 1, 0)] == 6


def test_a_fast_link_is_a_latency_and_a_slow_one_bounds_the_step() -> None:
    for name in ("1f1b", "interleaved", "zb-v"):
        schedule = make_schedule(name, 4, 12)
        fast = simulate(schedule, Costs(message_bytes=1, bandwidth=4)).makespan  # each message is gone before the next
        assert fast == pytest.approx(simulate(schedule, Costs(latency=0.25)).makespan)
        slow = simulate(schedule, Costs(message_bytes=1, bandwidth=0.01))
        messages = [action for action in slow.ends if action in slow.arrivals]
        links = {(schedule.rank_of(action), schedule.target_of(action)) for action in messages}
        busiest = max(
            sum((schedule.rank_of(action), schedule.target_of(action)) == link for action in messages) for link in links
        )
        assert 1 <= slow.makespan / (busiest * 100) < 3


def test_the_older_of_a_pairs_two_messages_leaves_first_where_they_share_a_link() -> None:
    schedule = make_schedule("dualpipe", 2, 8)
    played = simulate(schedule, Costs(message_bytes=1, bandwidth=10))
    pair = next(
        entry
        for entry in schedule.order[0]
        if isinstance(entry, Pair) and all(p in played.arrivals for p in entry.parts)
    )
    older, younger = sorted(pair.parts, key=lambda part: part.micro_batch)
    assert played.arrivals[older] < played.arrivals[younger] == pytest.approx(played.arrivals[older] + 0.1)


def test_bytes_are_counted_from_f_to_b_or_i_and_what_w_needs_until_w() -> None:
    one_unit = Memory(activations=1)
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe", "interleaved"):
        played = simulate(make_schedule(name, 4, 8), memory=one_unit)
        assert played.peak_bytes == played.peak_in_flight
    # zb-h1 holds p of what its W needs, on every rank, which 1f1b does on rank 0 only (Qi et al.: the memory of 1F1B).
    kept = simulate(make_schedule("zb-h1", 4, 8), memory=Memory(activations=1, kept_for_weights=1)).peak_bytes
    assert kept == (4, 4, 4, 4)
    assert simulate(make_schedule("zb-h1", 4, 8)).peak_bytes == ()


def test_bytes_are_those_of_each_stage_and_a_stage_held_twice_counts_twice() -> None:
    memory = Memory(activations=(10, 1, 1, 20), stage=(500, 100, 100, 700))
    assert simulate(make_schedule("1f1b", 4, 8), memory=memory).peak_bytes == (540, 103, 102, 720)
    held = simulate(
        make_schedule("dualpipe", 4, 8), memory=Memory(activations=0, stage=(500, 100, 100, 700))
    ).peak_bytes
    assert held == (1200, 200, 200, 1200)
    table = parse_csv("0F0,1F0,1B0,0B0\n", "one")
    assert simulate(table, memory=Memory((3, 4), stage=(1, 2))).peak_bytes == (10,)
    with pytest.raises(ConfigError, match="activations is given for 2 stages and there are 4"):
        simulate(make_schedule("1f1b", 4, 8), memory=Memory((1, 2)))


@given(
    name=st.sampled_from([*ALL_SCHEDULES]),
    half=st.integers(1, 3),
    more=st.integers(0, 4),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_any_schedule_plays_under_any_costs_and_no_message_is_used_before_it_is_there(
    name: str, half: int, more: int, data: st.DataObject
) -> None:
    schedule = make_schedule(name, 2 * half, 4 * half + 2 * more)
    times = st.integers(0, 16).map(lambda quarters: quarters / 4)
    each = st.tuples(*[times] * schedule.num_stages)
    forward, input_gradient, weight_gradient = data.draw(st.tuples(each, each, each))
    costs = Costs(
        forward,
        input_gradient,
        weight_gradient,
        latency=data.draw(times),
        pair=tuple(max(f, i + w) for f, i, w in zip(forward, input_gradient, weight_gradient, strict=True)),
        message_bytes=data.draw(times),
        bandwidth=data.draw(st.sampled_from([0.5, 2.0, 1000.0])),
    )
    check_schedule(schedule)
    played = simulate(schedule, costs)
    for rank, row in enumerate(schedule.order):
        free_at = 0.0
        for entry in row:
            for action in entry.parts:
                start, end = played.starts[action], played.ends[action]
                assert start >= free_at and end == pytest.approx(start + costs.of(entry))
                source = schedule.input_of(action)
                if source is not None:
                    there = played.ends[source] if schedule.rank_of(source) == rank else played.arrivals[source]
                    assert start >= there
                assert action.kind == "F" or start >= played.ends[schedule.local_need_of(action)]
            free_at = end
        assert played.makespan >= free_at and played.bubble[rank] >= -1e-9
    assert played.makespan == max(played.ends.values())


def test_no_near_swap_of_two_actions_makes_a_valid_schedule_faster() -> None:
    random, counts = Random(0), Counter()
    schedules = [make_schedule(name, ranks, 12) for name in ALL_SCHEDULES for ranks in (2, 4)]
    baseline = {id(schedule): simulate(schedule, Costs(pair=2.5)).makespan for schedule in schedules}
    for _ in range(2000):
        schedule = random.choice(schedules)
        rows = [list(row) for row in schedule.order]
        row = random.choice(rows)
        at = random.randrange(len(row) - 1)
        to = min(len(row) - 1, at + random.randint(1, 3))
        row[at], row[to] = row[to], row[at]
        swapped = replace(schedule, order=tuple(map(tuple, rows)))
        try:
            check_schedule(swapped)
        except ConfigError:
            counts["refused"] += 1
            continue
        change = simulate(swapped, Costs(pair=2.5)).makespan - baseline[id(schedule)]
        counts["slower" if change > 1e-9 else "equal" if change > -1e-9 else f"faster {schedule.name}"] += 1
    assert counts.keys() == {"refused", "slower", "equal"} and min(counts.values()) > 100, counts

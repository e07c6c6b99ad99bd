"""The simulator against independently simulated records and closed forms."""

import json
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.pipeline import SCHEDULES, Action, Costs, Schedule, simulate

RECORDS = json.loads((Path(__file__).parents[1] / "oracles" / "schedules.json").read_text())["records"]


def test_every_record_of_gpipe_and_1f1b_is_met_exactly() -> None:
    records = [record for record in RECORDS if record["schedule"] in SCHEDULES]
    assert len(records) == 48
    for record in records:
        schedule = SCHEDULES[record["schedule"]](record["P"], record["M"])
        played = simulate(schedule, Costs(record["F"], record["I"], record["W"]))
        assert played.makespan == record["makespan"]
        assert list(played.bubble) == record["bubble_per_rank"]
        assert list(played.peak_in_flight) == record["peak_inflight"]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (4, 12), (8, 16), (8, 64)])
def test_a_slow_link_costs_1f1b_nearly_two_latencies_per_micro_batch(stages: int, micro_batches: int) -> None:
    latency = 0.25
    without = simulate(SCHEDULES["1f1b"](stages, micro_batches)).makespan
    with_it = simulate(SCHEDULES["1f1b"](stages, micro_batches), Costs(latency=latency)).makespan
    expected = latency * (2 * (stages - 1) * micro_batches / stages + 2 * (stages - 2))
    assert with_it - without == pytest.approx(expected)


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

"""A recorded step: what comes back from it, its times as costs, and what the viewers of Chrome and Perfetto are given."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.pipeline import ALL_SCHEDULES, Action, Costs, Schedule, make_schedule, simulate
from parallax.pipeline.actions import Pair, parse_entry
from parallax.pipeline.draw import chart_of, chart_of_trace
from parallax.pipeline.draw.perfetto import to_perfetto
from parallax.pipeline.trace import RECEIVE, RUN, SEND, WAIT, RankRecord, Trace, read_trace, write_trace


def recorded(schedule: Schedule, costs: Costs, origins: tuple[float, ...] = ()) -> Trace:
    """Return what ranks would record whose step goes exactly as simulated; each clock has another origin."""
    played = simulate(schedule, costs)
    records = []
    for rank, row in enumerate(schedule.order):
        origin = origins[rank] if origins else 0.0
        record, free_at = RankRecord(rank, origin), 0.0
        for entry in row:
            start, end = (played.starts[entry.parts[0]], played.ends[entry.parts[0]])
            for action in entry.parts:
                source = schedule.input_of(action)
                if source in played.arrivals:
                    times = (played.ends[source] + origin, played.arrivals[source] + origin)
                    record.add(RECEIVE, source, *times, schedule.rank_of(source))
                    if start > free_at:
                        record.add(WAIT, source, free_at + origin, start + origin, schedule.rank_of(source))
            record.add(RUN, entry, start + origin, end + origin)
            for action in entry.parts:
                if action in played.arrivals:
                    record.add(SEND, action, end + origin, played.arrivals[action] + origin, schedule.target_of(action))
            free_at = end
        records.append(RankRecord.from_data(json.loads(json.dumps(record.to_data()))))
    return Trace(schedule.name, reversed(records))


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_recorded_step_is_the_schedule_that_ran_and_is_drawn_as_its_simulation(name: str) -> None:
    schedule = make_schedule(name, 4, 12)
    costs = Costs(0.5, 0.625, 0.375, latency=0.125, pair=1.25)
    played = simulate(schedule, costs)
    trace = recorded(schedule, costs, origins=(0.0, 1024.0, -512.0, 4096.0))
    assert trace.schedule() == schedule and trace.makespan == played.makespan
    drawn, simulated = chart_of_trace(trace), chart_of(schedule, played)
    assert (drawn.rows, drawn.in_flight, drawn.end) == (simulated.rows, simulated.in_flight, simulated.end)
    bubble = max(played.bubble) / played.makespan
    assert drawn.title == f"{name}, recorded: 4 ranks, time {played.makespan:g} s, bubble {bubble:.1%}"
    again = simulate(schedule, Costs(**{**vars(trace.costs()), "latency": 0.125}))
    assert again.makespan == pytest.approx(played.makespan)


def test_the_costs_of_a_trace_are_the_medians_of_each_kind_on_each_stage() -> None:
    costs = Costs((1.0, 2.0), (1.5, 0.5), (0.5, 1.5), pair=(2.5, 3.0))
    trace = recorded(make_schedule("dualpipe", 2, 8), costs)
    # The two pairs of stages 0 and 1 gain what the lesser gains, 0.5; that is all a trace can show.
    # On stage 1 no backward is split in this table.
    assert trace.costs() == Costs((1.0, 2.0), (1.5, 2.0), (0.5, 0.0), pair=(2.5, 3.5))
    whole = recorded(make_schedule("1f1b", 2, 4), costs).costs()
    assert whole == Costs((1.0, 2.0), (2.0, 2.0), (0.0, 0.0))
    records = [RankRecord(0), RankRecord(1)]
    for number, slow in enumerate((1.0, 1.0, 9.0)):
        for rank, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B")):
            records[rank].add(RUN, Action(kind, rank, number), 10.0 * number, 10.0 * number + slow)
    assert Trace("slow", records).costs().forward == (1.0, 1.0)


def test_a_pair_costs_nothing_for_the_message_that_it_waits_for_inside() -> None:
    schedule = make_schedule("dualpipev", 2, 8)
    costs = Costs(1.0, 0.5, 0.5, pair=1.75)
    prompt, waits, records = recorded(schedule, costs), 0, []
    for record in prompt.records:
        late, delayed = 0.0, RankRecord(record.rank)
        for event in record.events:
            start, wait = event.start + late, 0.0
            source = schedule.input_of(event.what.parts[-1])
            if event.kind == RUN and isinstance(event.what, Pair) and source is not None:
                wait = 3.0
                delayed.add(WAIT, source, start + 0.25, start + 0.25 + wait, 1 - record.rank)
                waits += 1
            delayed.add(event.kind, event.what, start, event.end + late + wait, event.peer)
            late += wait
        records.append(delayed)
    trace = Trace("late", records)
    assert waits > 8 and trace.makespan > prompt.makespan + 4 * 3.0
    assert trace.costs() == prompt.costs() and trace.costs().pair == (1.75,) * 4
    # The time is the longer step's, and what the ranks did in it is the same: the rest is bubble.
    before, chart = chart_of_trace(prompt), chart_of_trace(trace)
    for rank in (0, 1):
        assert (1 - chart.idle(rank)) * chart.end == pytest.approx((1 - before.idle(rank)) * before.end)
    assert f"bubble {max(map(chart.idle, (0, 1))):.1%}" in chart.title


def test_a_message_takes_its_time_from_when_it_could_leave_also_out_of_the_middle_of_a_pair() -> None:
    """The result of a pair's forward leaves before its backward is done."""
    records = [RankRecord(0), RankRecord(1)]
    forward, pair = parse_entry("1F0"), parse_entry("(0F1|0B0)")
    assert isinstance(forward, Action) and isinstance(pair, Pair)
    records[0].add(RUN, parse_entry("0F0"), 0, 1)
    records[0].add(RUN, pair, 1, 5)
    records[0].add(SEND, pair.parts[0], 2, 3, 1)
    records[1].add(WAIT, pair.parts[0], 1, 3.5, 0)
    records[1].add(RUN, forward, 3.5, 4)
    assert Trace("pair", records).message_time() == 1.5


def test_a_ranks_share_is_the_average_and_a_whole_backward_two_halves() -> None:
    costs = Costs((1.0, 2.0, 3.0, 2.0), 0.5, 0.25, latency=0.5)
    assert recorded(make_schedule("1f1b", 4, 8), costs).share_costs() == Costs(2, 0.375, 0.375, latency=0.5)
    assert recorded(make_schedule("zb-v", 2, 8), costs).share_costs() == Costs(4, 1, 0.5, latency=0.5)
    paired = recorded(make_schedule("dualpipev", 2, 8), Costs(1, 1, 1, pair=2.5))
    assert paired.share_costs() == Costs(2, 2, 2, pair=5)
    assert paired.message_time() == 0


def test_a_trace_in_a_file_reads_back_and_what_is_none_is_said_so(tmp_path: Path) -> None:
    trace = recorded(make_schedule("zb-v", 2, 4), Costs(latency=0.5))
    write_trace(trace, tmp_path / "step.json")
    back = read_trace(tmp_path / "step.json")
    assert back.name == "zb-v" and back.records == trace.records
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        read_trace(tmp_path / "none.json")
    good = json.loads((tmp_path / "step.json").read_text())
    event = ["run", "0F0", 0.0, 1.0, None]
    for broken in (
        "{",
        "[]",
        "{}",
        json.dumps(good | {"format": "other"}),
        json.dumps(good | {"ranks": good["ranks"][1:]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": []}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", "0X0", 0.0, 1.0, None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["sleep", *event[1:]]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", "0F0", 2.0, 1.0, None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", "0F0"]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", "0F0", 0.0, float("inf"), None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", "0F0", 1.0, 1.0, None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", "0F0", 0.0, 1e-300, None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", 5, 0.0, 1.0, None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [event, ["run", "0F0", 1.0, 2.0, None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [event, ["run", "0B1", 1.0, 2.0, None]]}]}),
        json.dumps(good | {"ranks": [{"rank": 0, "events": [["run", "0B0", 0.0, 1.0, None], event]}]}),
        "[" * 100_000,
        json.dumps(good | {"ranks": []}),
    ):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"broken\.json is no trace of a pipeline step") as caught:
            read_trace(tmp_path / "broken.json")
        assert len(caught.value.problems) == 1


def test_the_viewers_get_a_process_for_each_rank_and_an_arrow_for_each_message() -> None:
    schedule = make_schedule("dualpipe", 4, 8)
    costs = Costs(latency=0.5, message_bytes=1, bandwidth=0.5)  # messages are under way while others leave
    played = simulate(schedule, costs)
    events = json.loads(to_perfetto(recorded(schedule, costs)))["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"rank {r}" for r in range(4)
    }
    slices = [event for event in events if event["ph"] == "X"]
    for rank in range(4):
        names = [event["name"] for event in slices if (event["pid"], event["cat"]) == (rank, RUN)]
        assert names == [str(entry) for entry in schedule.order[rank]]
    for thread in {(event["pid"], event["tid"]) for event in slices}:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread)
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(times))
    arrows = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys() and len(arrows["s"]) == len(played.arrivals)
    for index, start in arrows["s"].items():
        end = arrows["f"][index]
        assert end["ts"] > start["ts"] and end["pid"] != start["pid"] and end["bp"] == "e"
        made, used = (
            next(
                one["name"]
                for one in slices
                if (one["pid"], one["tid"], one["cat"]) == (arrow["pid"], 0, RUN)
                and one["ts"] < arrow["ts"] < one["ts"] + one["dur"]
            )
            for arrow in (start, end)
        )
        source = Action.parse(start["name"].removeprefix("result of "))
        assert source in parse_entry(made).parts
        assert source in map(schedule.input_of, parse_entry(used).parts)
    for cat, words in ((SEND, "to rank"), (RECEIVE, "from rank"), (WAIT, "wait for")):
        assert any(words in event["name"] for event in slices if event["cat"] == cat)


def test_recording_takes_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, parallax.pipeline.trace, parallax.pipeline.draw.perfetto; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

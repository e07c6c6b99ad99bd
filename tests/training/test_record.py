"""Recorded steps: every second is accounted for once, the slow rank is named, and all ranks lie on one time axis."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from parallax.mesh import Layout, Mesh
from parallax.training.observe import Observer, _straggler
from parallax.training.options import RunOptions
from parallax.training.profile import to_trace_events
from parallax.training.record import SHARES, Clock, Spans, StepRecorder, shares_of
from tests.distributed.harness import run_layout
from tests.distributed.training import Case, build, loader_of

SLOW = 0.8  # seconds that the last rank takes longer: long beside what a busy machine adds
LAYOUTS = [Layout(), Layout(dp=2), Layout(tp=2, pp=2)]


def test_what_is_waited_for_is_no_work_and_a_message_that_was_not_sent_is_a_bubble() -> None:
    spans = Spans(
        start=0.0,
        end=20.0,
        phases=[("data", 0.0, 1.0), ("reduction", 13.0, 15.0), ("optimizer", 16.0, 19.0)],
        runs=[("0F0", "forward", 2.0, 5.0), ("0B0", "backward", 8.0, 13.0), ("1F1+0B1", "both", 15.0, 15.75)],
        # The second and the third are one wait, made of two.
        waits=[
            ("tp", "all_reduce", 3.0, 3.5),
            ("tp", "all_reduce", 9.0, 11.0),
            ("tp", "all_gather", 9.5, 11.0),
            ("dp", "reduce_scatter", 13.5, 14.5),
            ("dp", "all_gather", 17.0, 18.0),
        ],
        messages=[("1B0", 5.0, 8.0, 7.5), ("1F1", 1.0, 2.0, 0.5)],
    )
    shares = shares_of(spans)
    assert shares == {
        "data": 1.0,
        "forward": 2.5 + 0.25,
        "backward": 3.0 + 0.5,
        "optimizer": 2.0,
        "tp": 2.5,
        "pp": 0.5 + 1.0,  # sent before it was waited for: under way all the time
        "dp": 2.0,
        "bubble": 2.5,
        "other": pytest.approx(20.0 - 17.75),
    }


def test_a_message_that_is_waited_for_inside_a_pair_is_counted_once() -> None:
    spans = Spans(
        start=0.0,
        end=16.0,
        runs=[("1F1+0B0", "both", 1.0, 8.0), ("1F2+0B1", "both", 9.0, 15.0)],
        waits=[("tp", "all_reduce", 2.0, 2.5), ("tp", "all_reduce", 6.5, 7.0)],
        # Sent while it was waited for; before; after, as clocks that differ may tell; and outside of any pair.
        messages=[("1B0", 3.0, 6.0, 5.0), ("1B1", 9.0, 11.0, 0.5), ("1B2", 12.0, 13.0, 14.0), ("0F3", 8.0, 9.0, 8.5)],
    )
    shares = shares_of(spans)
    worked = (8.0 - 1.0 - 3.0 - 2 * 0.5) + (15.0 - 9.0 - 2.0 - 1.0)
    assert shares == pytest.approx(
        dict.fromkeys(SHARES, 0.0)
        | {"forward": worked / 3, "backward": worked * 2 / 3, "tp": 1.0}
        | {"bubble": 2.0 + 1.0 + 0.5, "pp": 1.0 + 2.0 + 0.5, "other": 1.0 + 1.0}
    )
    assert sum(shares.values()) == pytest.approx(16.0) and min(shares.values()) >= 0


def _observed(mesh: Mesh, folder: str) -> dict:
    step, loader = build(mesh, Case(steps=3, zero=1)), loader_of(mesh, Case())
    observer = Observer(step, RunOptions(profile=2), Path(folder))
    rows, notices = [], []
    for number in (1, 2, 3):
        with observer.step(number, logged=number < 3) as recorder:
            if recorder is not None:
                with recorder.phase("data"):
                    time.sleep(SLOW if mesh.rank == mesh.layout.world_size - 1 else 0.0)
            began = time.perf_counter()
            step(loader.micro_batches(number), 1e-3, recorder)
            took = time.perf_counter() - began
        notices += observer.notices(number)
        rows.append(observer.values() | {"took": took})
    assert mesh.journal.record is None
    return {"rows": rows, "notices": notices}


@pytest.mark.parametrize(
    ("worked", "rank", "seconds"),
    [([1.0], 0, 0.0), ([1.0, 1.5], 1, 0.5), ([1.0, 1.5, 1.25], 1, 0.25), ([1.0, 1.5, 1.25, 1.125], 1, 0.375)],
)
def test_the_straggler_is_compared_with_a_rank_that_there_is(worked: list[float], rank: int, seconds: float) -> None:
    rows = torch.zeros(len(worked), len(SHARES), dtype=torch.float64)
    rows[:, SHARES.index("forward")] = torch.tensor(worked, dtype=torch.float64)
    rows[:, SHARES.index("bubble")] = 2 - rows.sum(1)  # what is waited is not worked
    assert _straggler(rows) == {"straggler": rank, "straggler_seconds": seconds}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_shares_of_all_ranks_are_told_and_the_slow_rank_named(layout: Layout, tmp_path: Path) -> None:
    results = run_layout(layout, _observed, str(tmp_path))
    for result in results:
        first, second, third = result["rows"]
        assert third.keys() == {"took"}, "a step that is neither logged nor asked for is not recorded"
        for row in (first, second):
            assert list(row["phases"]) == list(SHARES)
            assert row["straggler"] == layout.world_size - 1
            for name, share in row["phases"].items():
                assert len(share["ranks"]) == layout.world_size
                assert -1e-3 < share["min"] == min(share["ranks"]) and share["max"] == max(share["ranks"]), name
            assert row["phases"]["data"]["max"] >= SLOW and row["phases"]["forward"]["min"] > 0
            if layout.world_size > 1:
                assert row["straggler_seconds"] > SLOW / 2
                # The others wait for it, and say so.
                waits = ["tp", "pp", "dp", "bubble"]
                assert sum(row["phases"][name]["ranks"][0] for name in waits) > SLOW / 2
            json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_profile_shows_all_ranks_nested_and_in_time(layout: Layout, tmp_path: Path) -> None:
    (*_, result) = run_layout(layout, _observed, str(tmp_path))
    path = tmp_path / "profile-step-2.json"
    memory, profiled = result["notices"]
    assert memory.startswith("memory ")
    assert [profiled] == [f"profiled       step 2: {path}, for ui.perfetto.dev"]
    assert path.stat().st_size < 200_000
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(layout.world_size))
    by_thread: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for (_, thread), slices in by_thread.items():
        open_until: list[float] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.01, f"{event['name']} leaves what it lies in"
            assert thread == 0 or not open_until, "flights of one lane overlap"
            open_until.append(end)
    # Whatever is received was sent before: the clocks of the ranks agree.
    made = {(e["name"], e["pid"]): e["ts"] + e["dur"] for e in events if e.get("cat") in ("forward", "backward")}
    for event in events:
        if event["name"].startswith("wait for") and event.get("tid") == 0 and "(" not in event["name"]:
            ends = [
                end for (name, pid), end in made.items() if name == event["name"].split()[-1] and pid != event["pid"]
            ]
            assert ends and event["ts"] + event["dur"] >= min(ends)


def test_lanes_hold_flights_that_overlap() -> None:
    flights = [("tp", "all_reduce", 8, float(start), start + 2.5) for start in range(4)]
    events = json.loads(to_trace_events([Spans(0.0, 9.0, flights=flights)], Layout()))["traceEvents"]
    lanes: dict[int, list[dict]] = {}
    for event in events:
        if event["ph"] == "X" and event["tid"]:
            lanes.setdefault(event["tid"], []).append(event)
    assert len(lanes) == 3
    for lane in lanes.values():
        assert all(first["ts"] + first["dur"] <= second["ts"] for first, second in pairwise(lane))


# Of one step: two micro-batches a rank, four layers, a micro-batch's head and loss. What theory needs, and nothing else:
#   dp     how many targets there are | the buckets' sums | norm and loss, over the world | the buckets' parameters
#   tp     the embedding and, of each layer, two sums forward and two backward; the head's; the loss's one exchange
_MICRO_BATCHES = 2
COUNTS = {
    "dp2, zero 0": (Layout(dp=2), Case(zero=0, global_batch=8), {"dp": 1 + 1 + 1}),
    "dp2, zero 1": (Layout(dp=2), Case(zero=1, global_batch=8), {"dp": 1 + 1 + 1 + 1}),
    "dp2, zero 2": (Layout(dp=2), Case(zero=2, global_batch=8), {"dp": 1 + _MICRO_BATCHES + 1 + 1}),
    # Norms are held by both ranks; their bucket is summed too.
    "tp2": (Layout(tp=2), Case(zero=0, global_batch=4), {"tp": _MICRO_BATCHES * (1 + 4 * 4 + 1 + 1), "dp": 1 + 1}),
    "tp2, sp": (
        Layout(tp=2),
        Case(zero=0, sp=True, global_batch=4),
        # A layer gathers its input of q, k, v and of gate, up twice, and scatters and gathers each output and gradient once.
        {"tp": _MICRO_BATCHES * (2 + 4 * 10 + 3 + 1), "dp": 1 + 1},
    ),
    "pp2": (Layout(pp=2), Case(zero=0, global_batch=4), {"dp": 1, "pp": _MICRO_BATCHES}),
    "tp2 pp2 dp2": (
        Layout(tp=2, pp=2, dp=2),
        Case(zero=1, global_batch=8),
        # Of matrices and of norms a bucket: two sums and two gatherings.
        {"dp": 1 + 2 + 1 + 2, "pp": _MICRO_BATCHES},
    ),
}


def _counted(mesh: Mesh, names: list[str]) -> list[dict]:
    results = []
    for name in names:
        case = COUNTS[name][1]
        step, loader = build(mesh, case), loader_of(mesh, case)
        recorder = StepRecorder(mesh)
        step(loader.micro_batches(0), 1e-3, recorder)
        recorder.end()
        kinds = Counter(f"{call.group} {call.what}" for call in recorder.calls)
        results.append({"traffic": recorder.traffic(0), "kinds": dict(kinds)})
    return results


@pytest.mark.parametrize("layout", dict.fromkeys(layout for layout, *_ in COUNTS.values()), ids=str)
def test_a_step_communicates_as_often_as_theory_needs(layout: Layout) -> None:
    names = [name for name, (its_layout, *_) in COUNTS.items() if its_layout == layout]
    for rank in run_layout(layout, _counted, names):
        for name, result in zip(names, rank, strict=True):
            got = {axis: calls for axis, (calls, _) in result["traffic"].items()}
            for axis, expected in COUNTS[name][2].items():
                assert got[axis] == expected, (name, axis, result["kinds"])


def _clocks(mesh: Mesh) -> float:
    return Clock(mesh).ahead


def test_processes_of_one_machine_have_one_clock() -> None:
    assert run_layout(Layout(dp=2), _clocks) == [0.0, 0.0]


def test_a_recorder_leaves_the_numbers_of_a_step_as_they_are() -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    losses = []
    for recorded in (False, True):
        step, loader = build(mesh, Case()), loader_of(mesh, Case())
        for number in range(3):
            recorder = StepRecorder(mesh) if recorded else None
            result = step(loader.micro_batches(number), 1e-3, recorder)
            if recorder is not None:
                recorder.end()
            losses.append((result.loss.item(), result.grad_norm.item()))
    assert losses[:3] == losses[3:]

"""Play a schedule under given costs: when each action runs, the bubble, and what is held in memory.

Each rank does its actions in order, each as soon as what it needs is there. Both results of a pair are there at its end. A
result for another rank leaves at the end of the action that made it, or when the messages before it on the same link
have left; sending costs the rank itself no time. The same play is the dry run that finds a deadlock, and its times give the
messages their global order (`parallax.pipeline.lower`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallax.errors import ConfigError
from parallax.pipeline.actions import Action, Schedule
from parallax.pipeline.costs import Costs, Memory, at_stage

_RANKS_NAMED = 4  # in a deadlock's message; the rest is counted


@dataclass(frozen=True)
class Simulation:
    """What came out; the tuples have one entry per rank.

    makespan: end of the last action; a step is taken to end for all ranks together.
    bubble: time a rank was not busy, `makespan - busy`.
    peak_in_flight: most micro-batches (counted per stage) at once whose forward has begun and whose B or I has not
        ended; in a forward-only schedule nothing is kept beyond the forward.
    peak_bytes: most bytes at once, of the stages and of activations; empty if no `Memory` was given.
    starts, ends: of each action.
    arrivals: when the results that go to another rank can be used there, by the action that made them.
    """

    makespan: float
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    starts: dict[Action, float]
    ends: dict[Action, float]
    arrivals: dict[Action, float]


def simulate(schedule: Schedule, costs: Costs | None = None, memory: Memory | None = None) -> Simulation:
    """Play `schedule`; every cost is 1 and messages take no time unless `costs` says otherwise.

    Raises ConfigError if it cannot come to its end, naming the action at which each rank is stuck, or if costs are given for
    another number of stages.
    """
    costs = costs or Costs()
    costs.check(schedule.num_stages)
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    arrivals: dict[Action, float] = {}
    link_free_at: dict[tuple[int, int], float] = {}
    position = [0] * schedule.num_ranks
    free_at = [0.0] * schedule.num_ranks
    asleep: dict[Action, list[int]] = {}  # what ranks wait for -> those ranks
    unmet: list[list[Action]] = [[] for _ in position]  # what the entries need that ranks are asleep at
    awake = list(range(schedule.num_ranks))
    while awake:
        rank = awake.pop()
        row = schedule.order[rank]
        while position[rank] < len(row):
            entry = row[position[rank]]
            needs = unmet[rank] or [need for action in entry.parts for need in _needs(schedule, action)]
            missing = next((need for need in needs if need not in ends), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(rank)
                unmet[rank] = needs
                break
            unmet[rank] = []
            there = (ends[need] if schedule.rank_of(need) == rank else arrivals[need] for need in needs)
            start = max([free_at[rank], *there])
            end = free_at[rank] = start + costs.of(entry)
            position[rank] += 1
            for action in sorted(entry.parts, key=lambda part: part.micro_batch):  # on a link the older one goes first
                starts[action], ends[action] = start, end
                target = schedule.target_of(action)
                if target is not None and target != rank:
                    left = max(end, link_free_at.get((rank, target), 0.0)) + costs.transfer
                    link_free_at[rank, target] = left
                    arrivals[action] = left + costs.latency
            for action in entry.parts:
                awake.extend(asleep.pop(action, ()))
    if asleep:
        raise ConfigError(
            _deadlock(schedule, position, {rank: need for need, ranks in asleep.items() for rank in ranks})
        )
    ranks = range(schedule.num_ranks)
    makespan = max(free_at)
    busy = tuple(sum(map(costs.of, row)) for row in schedule.order)
    return Simulation(
        makespan,
        busy,
        bubble=tuple(makespan - time for time in busy),
        peak_in_flight=tuple(peak_in_flight(schedule, rank) for rank in ranks),
        peak_bytes=() if memory is None else tuple(peak_bytes(schedule, rank, memory) for rank in ranks),
        starts=starts,
        ends=ends,
        arrivals=arrivals,
    )


def peak_in_flight(schedule: Schedule, rank: int) -> int:
    """Return the most micro-batches whose activations `rank` holds at once; it follows from the order alone."""
    return max(in_flight(schedule, rank), default=0)


def in_flight(schedule: Schedule, rank: int) -> Iterator[int]:
    """Yield for each entry of `rank` how many micro-batches, counted per stage, it holds activations of while it runs."""
    held = 0
    for entry in schedule.order[rank]:
        held += sum(action.kind == "F" for action in entry.parts)
        yield held
        held -= sum(action.kind in ("B", "I") or schedule.forward_only for action in entry.parts)


def peak_bytes(schedule: Schedule, rank: int, memory: Memory) -> float:
    """Return the most bytes that `rank` holds at once; it follows from the order alone."""
    memory.check(schedule.num_stages)
    held = most = sum(at_stage(memory.stage, stage) for stage in schedule.stages_of(rank))
    for entry in schedule.order[rank]:
        held += sum(at_stage(memory.activations, action.stage) for action in entry.parts if action.kind == "F")
        most = max(most, held)
        for action in entry.parts:
            if action.kind in ("B", "I") or schedule.forward_only:
                held -= at_stage(memory.activations, action.stage)
            if action.kind in ("I", "W"):
                held += at_stage(memory.kept_for_weights, action.stage) * (1 if action.kind == "I" else -1)
    return most


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    return [need for need in (schedule.local_need_of(action), schedule.input_of(action)) if need is not None]


def _deadlock(schedule: Schedule, position: list[int], waits: dict[int, Action]) -> str:
    named = [
        f"{schedule.where(rank, position[rank])}: {schedule.order[rank][position[rank]]} waits for {need}"
        for rank, need in sorted(waits.items())
    ]
    rest = f"; and {len(named) - _RANKS_NAMED} more ranks" if len(named) > _RANKS_NAMED else ""
    return f"schedule {schedule.name} comes to a deadlock: " + "; ".join(named[:_RANKS_NAMED]) + rest

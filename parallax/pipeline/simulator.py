"""Play a schedule under given costs: when each action runs, the bubble and the micro-batches in flight.

Each rank does its actions in order, each as soon as what it needs is there. A result that goes to another rank arrives
`latency` after the action that made it; sending costs the rank itself no time. Both results of a pair are there at its
end. The same play is the dry run that
finds a deadlock, and its times give the messages their global order (`parallax.pipeline.lower`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallax.errors import ConfigError
from parallax.pipeline.actions import Action, Entry, Pair, Schedule

_RANKS_NAMED = 4  # in a deadlock's message; the rest is counted


@dataclass(frozen=True)
class Costs:
    """Durations in one unit, of one micro-batch in one stage: F, I and W, with B = I + W; of a pair, and of a message.

    pair: of a forward and a backward done together; F + B, nothing gained, unless given.
    latency: from the end of an action to the moment its result can be used on another rank.
    sizes: of each stage, relative to the one that the durations are of; all 1 if empty.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    latency: float = 0.0
    pair: float | None = None
    sizes: tuple[float, ...] = ()

    def of(self, entry: Entry) -> float:
        """Return the duration of an action, or of a pair, which gains at most what its smaller stage can."""
        if isinstance(entry, Pair):
            apart, backward = [self.of(action) for action in entry.parts], self._kind("B")
            gain = 0.0 if self.pair is None else self.forward + backward - self.pair
            return sum(apart) - gain * min(self._size(action.stage) for action in entry.parts)
        return self._kind(entry.kind) * self._size(entry.stage)

    def _kind(self, kind: str) -> float:
        return {
            "F": self.forward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
            "B": self.input_gradient + self.weight_gradient,
        }[kind]

    def _size(self, stage: int) -> float:
        return self.sizes[stage] if self.sizes else 1.0


@dataclass(frozen=True)
class Simulation:
    """What came out; the tuples have one entry per rank.

    makespan: end of the last action; a step is taken to end for all ranks together.
    bubble: time a rank was not busy, `makespan - busy`.
    peak_in_flight: most micro-batches (counted per stage) at once whose forward has begun and whose B or I has not
        ended; in a forward-only schedule nothing is kept beyond the forward.
    starts, ends: of each action.
    """

    makespan: float
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    starts: dict[Action, float]
    ends: dict[Action, float]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Play `schedule`; every cost is 1 and the latency 0 unless `costs` says otherwise.

    Raises ConfigError if it cannot come to its end, naming the action at which each rank is stuck.
    """
    costs = costs or Costs()
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    position = [0] * schedule.num_ranks
    free_at = [0.0] * schedule.num_ranks
    asleep: dict[Action, list[int]] = {}  # what ranks wait for -> those ranks
    awake = list(range(schedule.num_ranks))
    while awake:
        rank = awake.pop()
        row = schedule.order[rank]
        while position[rank] < len(row):
            entry = row[position[rank]]
            needs = [need for action in entry.parts for need in _needs(schedule, action)]
            missing = next((need for need in needs if need not in ends), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(rank)
                break
            start = max([free_at[rank], *(_arrival(schedule, need, rank, ends, costs) for need in needs)])
            free_at[rank] = start + costs.of(entry)
            position[rank] += 1
            for action in entry.parts:
                starts[action], ends[action] = start, free_at[rank]
                awake.extend(asleep.pop(action, ()))
    if asleep:
        raise ConfigError(
            _deadlock(schedule, position, {rank: need for need, ranks in asleep.items() for rank in ranks})
        )
    makespan = max(free_at)
    busy = tuple(sum(map(costs.of, row)) for row in schedule.order)
    bubble = tuple(makespan - time for time in busy)
    peaks = tuple(peak_in_flight(schedule, rank) for rank in range(schedule.num_ranks))
    return Simulation(makespan, busy, bubble, peaks, starts, ends)


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


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    return [need for need in (schedule.local_need_of(action), schedule.input_of(action)) if need is not None]


def _arrival(schedule: Schedule, need: Action, rank: int, ends: dict[Action, float], costs: Costs) -> float:
    return ends[need] + (costs.latency if schedule.rank_of(need) != rank else 0.0)


def _deadlock(schedule: Schedule, position: list[int], waits: dict[int, Action]) -> str:
    named = [
        f"rank {rank}, position {position[rank]}: {schedule.order[rank][position[rank]]} waits for {need}"
        for rank, need in sorted(waits.items())
    ]
    rest = f"; and {len(named) - _RANKS_NAMED} more ranks" if len(named) > _RANKS_NAMED else ""
    return f"schedule {schedule.name} comes to a deadlock: " + "; ".join(named[:_RANKS_NAMED]) + rest

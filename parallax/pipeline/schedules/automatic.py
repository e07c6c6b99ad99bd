"""Choose a schedule by asking the simulator: the same model on the same ranks, under the costs of this machine.

    choice = choose_schedule(8, 32, Costs(1, 1, 1, pair=2.5, latency=0.1), Memory(1e9), memory_limit=12e9)
    choice.name, choice.num_chunks, choice.schedule, choice.why

Costs are of what a rank holds in all, a p-th of the model; where a schedule cuts that into thinner stages, an action takes
so much less and a message as long. So what the choice weighs is the bubble, what links cost, what a pair gains and what is
held. A schedule that is a hair faster and holds twice as much is no better: of those within 1% of the fastest the one that
holds least is taken, then the one with the fewest messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from parallax.errors import ConfigError
from parallax.pipeline.actions import Schedule
from parallax.pipeline.costs import Costs, Memory
from parallax.pipeline.schedules import ALL_SCHEDULES, make_schedule
from parallax.pipeline.simulator import Simulation, simulate

CHUNKS = (1, 2, 4)  # tried where a schedule leaves it open how many stages a rank holds
_CLOSE = 1.01
_NAMED = 3  # of those that were not chosen

CostsOf = Callable[[int], Costs]
MemoryOf = Callable[[int], Memory]


@dataclass(frozen=True)
class Candidate:
    """A schedule that these ranks and micro-batches can use, and what the simulator says of it.

    num_chunks: what `make_schedule` takes; None where the schedule says itself.
    """

    name: str
    num_chunks: int | None
    schedule: Schedule
    played: Simulation

    @property
    def stages_per_rank(self) -> float:
        """Into how many stages a rank's share of the model is cut."""
        return self.schedule.num_stages / self.schedule.num_ranks

    @property
    def activations(self) -> float:
        """Most activations on a rank, in those of one micro-batch in a rank's whole share of the model."""
        return max(self.played.peak_in_flight) / self.stages_per_rank

    @property
    def weights(self) -> float:
        """Weights on a rank, in shares of the model: 2 where stages are held twice."""
        return len(self.schedule.stages_of(0)) / self.stages_per_rank

    @property
    def held(self) -> tuple[float, ...]:
        """What a smaller of is better: bytes, if they are known; else weights, then activations."""
        return (max(self.played.peak_bytes),) if self.played.peak_bytes else (self.weights, self.activations)

    def __str__(self) -> str:
        if self.num_chunks is None:
            return self.name
        return f"{self.name} with {self.num_chunks} stage{'s' if self.num_chunks > 1 else ''} a rank"


@dataclass(frozen=True)
class Choice:
    """The schedule that was chosen, a sentence that says why, all that were simulated, fastest first, and why others were not."""

    chosen: Candidate
    why: str
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]

    @property
    def name(self) -> str:
        """The schedule's name; with `num_chunks`, what `make_schedule` takes."""
        return self.chosen.name

    @property
    def num_chunks(self) -> int | None:
        """Stages a rank, where the schedule leaves that open."""
        return self.chosen.num_chunks

    @property
    def schedule(self) -> Schedule:
        """The table."""
        return self.chosen.schedule


def compare_schedules(
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs | CostsOf,
    memory: Memory | MemoryOf | None = None,
    *,
    names: Iterable[str] = ALL_SCHEDULES,
    most_stages: int | None = None,
    cut: Callable[[int], object] | None = None,
) -> tuple[list[Candidate], list[str]]:
    """Simulate all schedules; returns those that these sizes can use, fastest first, and a sentence for each other.

    costs, memory: of a rank's whole share of the model; or functions that give, for a number of stages, those of a stage.
    names: of the schedules to try.
    most_stages: into how many the model can be cut: its layers.
    cut: cuts it into a number of stages; raises ConfigError where that cannot be, and the schedule is left out.
    """
    candidates, left_out = [], []
    for name in names:
        constraints = ALL_SCHEDULES[name].constraints
        for chunks in (None,) if constraints.chunks else [each for each in CHUNKS if each >= constraints.least_chunks]:
            stages = constraints.num_stages(num_ranks, chunks)
            try:
                if most_stages is not None and stages > most_stages:
                    raise ConfigError(f"schedule {name} needs {stages} stages, and there are {most_stages} layers")
                schedule = make_schedule(name, num_ranks, num_micro_batches, chunks)
                if cut is not None:
                    cut(stages)
                stage_costs = costs.split(stages / num_ranks) if isinstance(costs, Costs) else costs(stages)
                stage_memory = (
                    memory.split(stages / num_ranks) if isinstance(memory, Memory) else memory and memory(stages)
                )
                candidates.append(Candidate(name, chunks, schedule, simulate(schedule, stage_costs, stage_memory)))
            except ConfigError as error:
                left_out.append(str(error))
    return sorted(candidates, key=lambda each: (each.played.makespan, each.held)), left_out


def choose_schedule(
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs | CostsOf,
    memory: Memory | MemoryOf | None = None,
    *,
    memory_limit: float | None = None,
    names: Iterable[str] = ALL_SCHEDULES,
    most_stages: int | None = None,
    cut: Callable[[int], object] | None = None,
) -> Choice:
    """Return the schedule to use; arguments as in `compare_schedules`.

    memory_limit: bytes that a rank may hold as `memory` counts them.
    Raises ConfigError if none can be used, or none within the limit.
    """
    assert memory_limit is None or memory is not None, "a limit needs the bytes of a stage"
    found, left_out = compare_schedules(
        num_ranks, num_micro_batches, costs, memory, names=names, most_stages=most_stages, cut=cut
    )
    if not found:
        raise ConfigError(left_out)
    fitting = [each for each in found if memory_limit is None or each.held[0] <= memory_limit]
    if not fitting:
        least = min(found, key=lambda each: each.held)
        raise ConfigError(
            f"no schedule for {num_ranks} ranks and {num_micro_batches} micro-batches holds at most {memory_limit:g} bytes on "
            f"each rank; the least is {least.held[0]:g}, of {least}; use more ranks (--pp), or less in a micro-batch"
        )
    left_out += [f"{each} holds {each.held[0]:g} bytes on a rank" for each in found if each not in fitting]
    fastest = fitting[0].played.makespan
    close = [each for each in fitting if each.played.makespan <= _CLOSE * fastest]
    # Where all is equal, as with one rank, the usual one.
    chosen = min(
        close, key=lambda each: (each.held, len(each.played.arrivals), each.played.makespan, each.name != "1f1b")
    )
    return Choice(chosen, _why(chosen, fitting, close, len(found)), tuple(found), tuple(left_out))


def _why(chosen: Candidate, fitting: list[Candidate], close: list[Candidate], num_found: int) -> str:
    time = chosen.played.makespan
    bubble = max(chosen.played.bubble) / time
    others = [
        f"{each} {each.played.makespan / time - 1:+.1%}"
        for each in [*fitting, *(each for each in fitting if each.name == "1f1b")]
        if each not in close
    ]
    fit = (
        f"the {len(fitting)} of {num_found} that fit in memory"
        if len(fitting) < num_found
        else f"{num_found} schedules"
    )
    among = (
        f"the fastest of {fit}"
        if len(close) == 1
        else f"of {fit}, {len(close)} are within 1% of the fastest, and it holds least of these"
    )
    rest = f"; against it {', '.join(dict.fromkeys([*others[: _NAMED - 1], *others[-1:]]))}" if others else ""
    rest += "; it holds each stage twice" if chosen.weights > 1 else ""
    return f"{chosen}: a step takes {time:g}, {bubble:.1%} of it bubble; {among}{rest}"

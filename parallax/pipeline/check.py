"""Prove a schedule before anything starts: complete, in a possible order, free of deadlock, messages in mirrored order.

    table     every action on the rank that owns its stage; per stage each micro-batch once forward and once backward
              (B, or I and W), in that order, all on one pipe; the two of a pair do not need each other
    dry run   the table comes to its end when sends are buffered
    program   after lowering, the sends of one rank to another and the receives there come in the same order, and the
              whole comes to its end even if each send and each receive blocks until its partner arrives (rendezvous)

What is broken is said in one sentence that names rank, position and action.
"""

from __future__ import annotations

from typing import NoReturn

from parallax.errors import ConfigError
from parallax.pipeline.actions import KINDS, Action, Schedule
from parallax.pipeline.lower import Program, Receive, Send, Step, lower_schedule
from parallax.pipeline.simulator import in_flight


def check_schedule(schedule: Schedule) -> Program:
    """Prove `schedule` and return the program that was proved; raises ConfigError."""
    _check_shape(schedule)
    _check_actions(schedule)
    _check_complete(schedule)
    _check_local_order(schedule)
    program = lower_schedule(schedule)
    check_program(program)
    return program


def check_program(program: Program) -> None:
    """Prove that messages pair up between each two ranks, and that blocking sends and receives would not deadlock."""
    _check_mirrored(program)
    _check_rendezvous(program)


def check_memory(schedule: Schedule, max_in_flight: int) -> None:
    """Check that no rank ever holds the activations of more than `max_in_flight` micro-batches, counted per stage."""
    for rank in range(schedule.num_ranks):
        for place, held in enumerate(in_flight(schedule, rank)):
            if held > max_in_flight:
                _fail(schedule, rank, place, f"{held} micro-batches are then in flight, more than {max_in_flight}")


def _fail(schedule: Schedule, rank: int, place: int, what: str) -> NoReturn:
    raise ConfigError(f"schedule {schedule.name}, {schedule.where(rank, place)}, {schedule.order[rank][place]}: {what}")


def _check_shape(schedule: Schedule) -> None:
    sizes = (schedule.num_stages, schedule.num_ranks, schedule.num_micro_batches)
    if min(sizes) < 1:
        raise ConfigError(f"schedule {schedule.name} needs at least 1 stage, rank and micro-batch; got {sizes}")
    if len(schedule.order) != schedule.num_ranks:
        raise ConfigError(
            f"schedule {schedule.name} is said to be for {schedule.num_ranks} ranks and lists {len(schedule.order)}"
        )
    idle = next((rank for rank, row in enumerate(schedule.order) if not row), None)
    if idle is not None:
        raise ConfigError(f"schedule {schedule.name}, rank {idle}: it does nothing; each rank needs a stage")
    for pipe, row in enumerate(schedule.owner):
        if len(row) != schedule.num_stages or not all(0 <= rank < schedule.num_ranks for rank in row):
            raise ConfigError(
                f"schedule {schedule.name}: pipe {pipe} must give each of the {schedule.num_stages} stages a rank "
                f"below {schedule.num_ranks}; it gives {list(row)}"
            )


def _check_actions(schedule: Schedule) -> None:
    seen: dict[Action, int] = {}
    for rank, row in enumerate(schedule.order):
        for place, action in ((place, action) for place, entry in enumerate(row) for action in entry.parts):
            if action.pipe >= len(schedule.owner):
                _fail(schedule, rank, place, f"there are {len(schedule.owner)} pipes")
            if action.stage >= schedule.num_stages:
                _fail(schedule, rank, place, f"stages go from 0 to {schedule.num_stages - 1}")
            if action.micro_batch >= schedule.num_micro_batches:
                _fail(schedule, rank, place, f"micro-batches go from 0 to {schedule.num_micro_batches - 1}")
            if schedule.rank_of(action) != rank:
                _fail(schedule, rank, place, f"its stage belongs to rank {schedule.rank_of(action)}")
            if action in seen:
                _fail(schedule, rank, place, f"it was done before, at position {seen[action]}")
            if schedule.forward_only and action.kind != "F":
                _fail(schedule, rank, place, "a forward-only schedule has no backward")
            seen[action] = place


def _check_complete(schedule: Schedule) -> None:
    """Check that each micro-batch takes one pipe, and that each of its stages does all it must and no more."""
    pipes: dict[int, int] = {}
    for here in range(schedule.num_ranks):
        for action in schedule.actions_of(here):
            if pipes.setdefault(action.micro_batch, action.pipe) != action.pipe:
                rank, place = schedule.places[action]
                _fail(
                    schedule,
                    rank,
                    place,
                    f"micro-batch {action.micro_batch} is also on pipe {pipes[action.micro_batch]}",
                )
    for number in range(schedule.num_micro_batches):
        if number not in pipes:
            raise ConfigError(
                f"schedule {schedule.name} is for micro-batches 0 to {schedule.num_micro_batches - 1} and never does "
                f"micro-batch {number}"
            )
        for stage in range(schedule.num_stages):
            _check_chunk(schedule, Action("F", stage, number, pipes[number]))


def _check_chunk(schedule: Schedule, forward: Action) -> None:
    here = [action for action in map(forward.at, KINDS) if action in schedule.places]
    if "".join(action.kind for action in here) in (("F",) if schedule.forward_only else ("FB", "FIW")):
        return
    rank = schedule.rank_of(forward)
    if not here:
        raise ConfigError(
            f"schedule {schedule.name}, rank {rank}: {forward} is in none of its {len(schedule.order[rank])} positions"
        )
    _fail(
        schedule,
        rank,
        schedule.places[here[-1]][1],
        f"for this micro-batch the stage does {', '.join(map(str, here))}; it must do "
        + ("F" if schedule.forward_only else "F and B, or F, I and W"),
    )


def _check_local_order(schedule: Schedule) -> None:
    for action, (rank, place) in schedule.places.items():
        need = schedule.local_need_of(action)
        if need is None:
            continue
        other = schedule.places[need][1]
        if other == place:
            _fail(schedule, rank, place, f"the two are of one chunk, and {action} needs {need}")
        if other > place:
            _fail(schedule, rank, place, f"it needs {need}, which comes later, at position {other}")


def _check_mirrored(program: Program) -> None:
    """Check that what a rank sends to another, in order, is what that one receives from it, in order."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for row in program.steps:
        for step in row:
            if isinstance(step, (Send, Receive)):
                lists = sent if isinstance(step, Send) else received
                lists.setdefault((step.message.source, step.message.target), []).append(step.message.producer)
    for pair in sorted(sent.keys() | received.keys()):
        outgoing, incoming = sent.get(pair, []), received.get(pair, [])
        for place in range(max(len(outgoing), len(incoming))):
            mine = outgoing[place] if place < len(outgoing) else "nothing"
            theirs = incoming[place] if place < len(incoming) else "nothing"
            if mine != theirs:
                raise ConfigError(
                    f"schedule {program.schedule.name}: message {place} from rank {pair[0]} to rank {pair[1]} is sent "
                    f"as the result of {mine} and received as that of {theirs}"
                )


def _check_rendezvous(program: Program) -> None:
    """Run the program with every send and receive blocking until both ends stand at it."""
    position = [0] * len(program.steps)
    arrived: set[Action] = set()  # the consumers whose input is there

    def current(rank: int) -> Step | None:
        return program.steps[rank][position[rank]] if position[rank] < len(program.steps[rank]) else None

    awake = list(range(len(program.steps)))
    while awake:
        rank = awake.pop()
        while (step := current(rank)) is not None:
            if not isinstance(step, (Send, Receive)):
                if any(action in program.inbox and action not in arrived for action in step.parts):
                    break
            else:
                message = step.message
                partner = message.target if isinstance(step, Send) else message.source
                if current(partner) != (Receive(message) if isinstance(step, Send) else Send(message)):
                    break
                arrived.add(message.consumer)
                position[partner] += 1
                awake.append(partner)
            position[rank] += 1
    stuck = [rank for rank in range(len(program.steps)) if current(rank) is not None]
    if stuck:
        rank = stuck[0]
        raise ConfigError(
            f"schedule {program.schedule.name} deadlocks when sends wait for their receives: {len(stuck)} ranks are stuck, "
            f"rank {rank} at position {position[rank]}, {current(rank)}"
        )

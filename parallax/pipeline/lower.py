"""Derive from a schedule what is sent between ranks, and put computing, sending and receiving into one order.

A message goes wherever an action takes its input from another rank. All messages are sorted by the time at which they
leave in a simulation (F = I = W = 1), which gives one global order for the whole pipeline. Each rank's steps follow it:

    Send(m)      right after the action that makes m
    Receive(m)   the receive is posted, at the time m leaves its sender; the consumer of m waits for it later

Since both ends of every message stand in the same global order, the sends and receives between two ranks mirror each
other without tags, and nothing can deadlock even if every send and receive blocked until its partner arrived
(`parallax.pipeline.check` proves it again for each program). Receives posted in the order of use instead, against sends
in the order of production, pair up wrongly: torch 2.13's `defer_pp_recv` then trains on wrong gradients silently.

Where messages carry tags (gloo), order does not matter but earliness does: gloo moves bytes only once the receive is
posted. `post_early` moves the receives of a rank forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from parallax.pipeline.actions import Action, Entry, Schedule
from parallax.pipeline.simulator import simulate


@dataclass(frozen=True)
class Message:
    """The result of `producer` on its way to `consumer`.

    index: place in the global order of the step's messages, the same on every rank.
    source, target: pipeline ranks.
    made_at, used_at: positions of producer and consumer in their ranks' orders. Whoever gets a message knows that its
        sender has done everything before `made_at`, so has received every message with a `used_at` below that.
    """

    index: int
    producer: Action
    consumer: Action
    source: int
    target: int
    made_at: int
    used_at: int

    @property
    def is_gradient(self) -> bool:
        """Whether it goes from a stage to the one before it."""
        return self.producer.kind != "F"

    @property
    def boundary(self) -> tuple[int, int]:
        """Pipe and stage whose output has the shape of this message."""
        return self.producer.pipe, self.consumer.stage if self.is_gradient else self.producer.stage


@dataclass(frozen=True)
class Send:
    """Start to send; never blocks."""

    message: Message

    def __str__(self) -> str:
        return f"send({self.message.producer} to rank {self.message.target})"


@dataclass(frozen=True)
class Receive:
    """Post the receive of a message; its consumer waits for it."""

    message: Message

    def __str__(self) -> str:
        return f"receive({self.message.producer} from rank {self.message.source})"


Step = Entry | Send | Receive


@dataclass(frozen=True, eq=False)
class Program:
    """A schedule with its messages: for each rank the steps to be done one after the other."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]

    @cached_property
    def inbox(self) -> dict[Action, Message]:
        """The message that each action takes its input from; actions fed by their own rank are not in it."""
        received = (step.message for row in self.steps for step in row if isinstance(step, Receive))
        return {message.consumer: message for message in received}

    @cached_property
    def outbox(self) -> dict[Action, Message]:
        """The message that each action's result goes out in; results used on their own rank are not in it."""
        return {message.producer: message for message in self.inbox.values()}


def lower_schedule(schedule: Schedule) -> Program:
    """Return the program of `schedule`; raises ConfigError if it cannot come to its end."""
    played = simulate(schedule)
    messages = _messages(schedule, played.ends)
    # At equal times messages come first: what leaves at t was made before t, and may be needed at t.
    rows: list[list[tuple[tuple[float, int, int], Step]]] = [
        [((played.starts[entry.parts[0]], 1, place), entry) for place, entry in enumerate(row)]
        for row in schedule.order
    ]
    for message in messages:
        key = (played.ends[message.producer], 0, message.index)
        rows[message.source].append((key, Send(message)))
        rows[message.target].append((key, Receive(message)))
    return Program(schedule, tuple(tuple(step for _, step in sorted(row, key=lambda entry: entry[0])) for row in rows))


def _messages(schedule: Schedule, ends: dict[Action, float]) -> list[Message]:
    pairs = []
    for rank in range(schedule.num_ranks):
        for consumer in schedule.actions_of(rank):
            producer = schedule.input_of(consumer)
            if producer is not None and schedule.rank_of(producer) != schedule.rank_of(consumer):
                # At equal times older micro-batches first: a late upstream rank then holds up no send behind it.
                pairs.append((ends[producer], producer.micro_batch, *schedule.places[producer], producer, consumer))
    pairs.sort(key=lambda pair: pair[:4])  # the places are unique: the sort never looks further
    return [
        Message(index, producer, consumer, source, schedule.rank_of(consumer), made_at, schedule.places[consumer][1])
        for index, (_, _, source, made_at, producer, consumer) in enumerate(pairs)
    ]


def post_early(steps: tuple[Step, ...], lookahead: int) -> tuple[Step, ...]:
    """Return one rank's steps with each receive posted `lookahead` receives before the one that is waited for.

    At each action that needs a message, its own receive and those of the next `lookahead` such actions are posted. For
    transports that match by tag; the first are posted at the start of the step.
    """
    inbox = {step.message.consumer: step for step in steps if isinstance(step, Receive)}

    def consumers(step: Step) -> list[Action]:
        return [] if isinstance(step, (Send, Receive)) else [action for action in step.parts if action in inbox]

    waiting = [inbox[action] for step in steps for action in consumers(step)]
    result: list[Step] = list(waiting[:lookahead])
    posted = len(result)
    for step in steps:
        if isinstance(step, Receive):
            continue
        following = waiting[posted : posted + len(consumers(step))]
        result += following
        posted += len(following)
        result.append(step)
    return tuple(result)

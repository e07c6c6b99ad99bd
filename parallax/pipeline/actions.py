"""What a rank of a pipeline does in one step, as data: actions, and the table of them that is a schedule.

    F   forward of one micro-batch through one stage
    B   its whole backward
    I   the half of the backward that makes the gradient of the stage's input
    W   the other half, which makes the gradients of the stage's weights (B = I + W; Qi et al. 2024, arXiv:2401.10241)

A rank does one entry of its list after the other: an action, or a pair of them, `(0F4|3B1)`, a forward and a whole
backward of different chunks that it does at once, so that each computes while the other communicates (DualPipe).

An action also names its pipe. A pipe is one way from the first stage to the last; schedules that feed micro-batches
from both ends (DualPipe) have two pipes over the same stages, owned by different ranks. `1F3` reads: stage 1, forward,
micro-batch 3; a pipe after the first is a letter in front, `b1F3`.

Nothing here says when something is sent: what an action needs follows from the table (`Schedule.input_of`), and the
messages between ranks are derived from that in `parallax.pipeline.lower`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from parallax.errors import ConfigError

KINDS = ("F", "B", "I", "W")
_TEXT = re.compile(r"([b-z]?)(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_PAIR = re.compile(r"\(([^|;]*)[|;]([^|;]*)\)(?:OVERLAP_F_B)?")  # the second form is torch's: (0F4;3B1)OVERLAP_F_B


@dataclass(frozen=True)
class Action:
    """One piece of work of one rank: a kind, on one stage, for one micro-batch of the step."""

    kind: str
    stage: int
    micro_batch: int
    pipe: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS and min(self.stage, self.micro_batch) >= 0 and 0 <= self.pipe < 26, repr(self)

    def __str__(self) -> str:
        pipe = chr(ord("a") + self.pipe) if self.pipe else ""
        return f"{pipe}{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is not an action; write stage, kind (F, B, I or W) and micro-batch, as in 1F3, "
                "with a letter from b on in front for a pipe after the first"
            )
        pipe, stage, kind, micro_batch = match.groups()
        return cls(kind, int(stage), int(micro_batch), ord(pipe) - ord("a") if pipe else 0)

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions that this entry consists of: itself."""
        return (self,)

    @property
    def chunk(self) -> tuple[int, int, int]:
        """What the kinds of work on one micro-batch in one stage have in common: (pipe, stage, micro-batch)."""
        return self.pipe, self.stage, self.micro_batch

    def at(self, kind: str, stage: int | None = None) -> Action:
        """Return the action of another kind, or on another stage, for the same micro-batch of the same pipe."""
        return Action(kind, self.stage if stage is None else stage, self.micro_batch, self.pipe)


@dataclass(frozen=True)
class Pair:
    """A forward and a whole backward, of different chunks of one rank, that begin together; both are over when the pair is."""

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        assert self.forward.kind == "F" and self.backward.kind == "B", repr(self)

    def __str__(self) -> str:
        return f"({self.forward}|{self.backward})"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The two actions, forward first."""
        return self.forward, self.backward


Entry = Action | Pair


def parse_entry(text: str) -> Entry:
    """Return the action or the pair that prints as `text`; pairs are also read as torch.distributed.pipelining writes them."""
    match = _PAIR.fullmatch(text.strip())
    if match is None:
        return Action.parse(text)
    forward, backward = map(Action.parse, match.groups())
    if (forward.kind, backward.kind) != ("F", "B"):
        raise ConfigError(f"{text!r} is not a pair; it takes one forward and one whole backward, as in (0F4|3B1)")
    return Pair(forward, backward)


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order, in one step.

    order: for each pipeline rank its entries, first to last.
    owner: `owner[pipe][stage]` is the rank that holds that stage for that pipe.
    forward_only: no gradients are wanted (evaluation); otherwise each forward has its backward.
    origin: for each entry where a user wrote it, "mine.csv, line 2, column 5"; empty for what no user wrote.
    """

    name: str
    num_stages: int
    num_ranks: int
    num_micro_batches: int
    order: tuple[tuple[Entry, ...], ...]
    owner: tuple[tuple[int, ...], ...]
    forward_only: bool = False
    origin: tuple[tuple[str, ...], ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        rows = (f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.order))
        return "\n".join([f"{self.name}, {self.num_stages} stages, {self.num_micro_batches} micro-batches", *rows])

    @cached_property
    def places(self) -> dict[Action, tuple[int, int]]:
        """Where each action stands: (rank, position in that rank's order); the two of a pair have the same place."""
        return {
            action: (rank, place)
            for rank, row in enumerate(self.order)
            for place, entry in enumerate(row)
            for action in entry.parts
        }

    def where(self, rank: int, place: int) -> str:
        """Return in words where an entry stands, for a sentence that says what is wrong with it."""
        origin = f" ({self.origin[rank][place]})" if self.origin else ""
        return f"rank {rank}, position {place}{origin}"

    def actions_of(self, rank: int) -> Iterator[Action]:
        """Yield the actions of `rank`, first to last, pairs taken apart."""
        return (action for entry in self.order[rank] for action in entry.parts)

    def rank_of(self, action: Action) -> int:
        """Return the rank that owns the action's stage in its pipe."""
        return self.owner[action.pipe][action.stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, for any pipe, ascending."""
        return tuple(sorted({stage for row in self.owner for stage, owner in enumerate(row) if owner == rank}))

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage the ranks that hold it, for any pipe, ascending."""
        return tuple(tuple(sorted({row[stage] for row in self.owner})) for stage in range(self.num_stages))

    def forwards(self) -> Schedule:
        """Return the schedule that does this one's forwards only, in the same order: evaluation."""
        order = tuple(
            tuple(action for entry in row for action in entry.parts if action.kind == "F") for row in self.order
        )
        return replace(self, name=f"{self.name}, forwards only", order=order, forward_only=True)

    def input_of(self, action: Action) -> Action | None:
        """Return the action on the neighbouring stage whose result `action` takes; None at the ends and for W."""
        if action.kind == "F":
            return action.at("F", action.stage - 1) if action.stage > 0 else None
        if action.kind == "W" or action.stage == self.num_stages - 1:
            return None
        split = action.at("I", action.stage + 1)
        return split if split in self.places else action.at("B", action.stage + 1)

    def target_of(self, action: Action) -> int | None:
        """Return the rank that uses the action's result: the neighbouring stage's owner; None at the ends and for W."""
        stage = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= stage < self.num_stages:
            return None
        return self.owner[action.pipe][stage]

    def local_need_of(self, action: Action) -> Action | None:
        """Return the action on the same stage that has to be over before `action`; None for F."""
        return None if action.kind == "F" else action.at("I" if action.kind == "W" else "F")

    def last_backwards(self, rank: int) -> dict[Action, int]:
        """Return the last run of autograd backward through each stage of `rank`, a B or an I: {action: stage}."""
        last = {action.stage: action for action in self.actions_of(rank) if action.kind in ("B", "I")}
        return {action: stage for stage, action in last.items()}


def one_stage_per_rank(
    name: str, num_micro_batches: int, rows: list[list[tuple[str, int]]], forward_only: bool = False
) -> Schedule:
    """Return the schedule in which rank r holds stage r and does `rows[r]`, a list of (kind, micro-batch)."""
    order = tuple(tuple(Action(kind, stage, number) for kind, number in row) for stage, row in enumerate(rows))
    stages = len(rows)
    return Schedule(name, stages, stages, num_micro_batches, order, (tuple(range(stages)),), forward_only)

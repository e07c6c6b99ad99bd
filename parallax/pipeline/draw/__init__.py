"""Gantt charts of a schedule: a row for each rank, a colour for each kind of action, bubbles left blank, in flight below.

    chart = chart_of(schedule, simulate(schedule, costs))
    to_text(chart, width=100)             for a terminal (a rich.text.Text)
    to_html(chart)                        one file, with details under the pointer
    save_figure(chart, path, "png")       PNG or SVG, by matplotlib

Actions of one kind have two tones: of the pipe from the other end, or of a rank's second stage. A pair is a box with both of
its parts. A chart is plain data, so that what a real run recorded can be drawn in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallax.pipeline.actions import Action, Schedule
from parallax.pipeline.simulator import Simulation

NAMES = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
_COLORS = {"F": (66, 112, 193), "B": (46, 139, 87), "I": (124, 168, 48), "W": (222, 143, 40)}
_LIGHTEST = 0.55  # how far the last tone is on the way to white


@dataclass(frozen=True)
class Block:
    """What a rank did from `start` to `end`: one action or the two of a pair, each with its tone, 0 being the darkest."""

    start: float
    end: float
    parts: tuple[Action, ...]
    tones: tuple[int, ...]


@dataclass(frozen=True)
class Chart:
    """What is drawn; `rows` and `in_flight` have an entry for each rank.

    in_flight: (time, micro-batches that are held from then on), in order of time.
    """

    title: str
    rows: tuple[tuple[Block, ...], ...]
    in_flight: tuple[tuple[tuple[float, int], ...], ...]
    end: float
    num_tones: int

    def idle(self, rank: int) -> float:
        """Return which part of the time `rank` did nothing."""
        return 1 - sum(block.end - block.start for block in self.rows[rank]) / self.end

    @property
    def shortest(self) -> float:
        """The shortest time that a block takes."""
        times = [block.end - block.start for row in self.rows for block in row]
        return min((time for time in times if time > 0), default=self.end)

    @property
    def most_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each rank holds."""
        return tuple(max(count for _, count in curve) for curve in self.in_flight)


def chart_of(schedule: Schedule, played: Simulation) -> Chart:
    """Return the chart of a schedule that was simulated."""
    rows = []
    for rank, row in enumerate(schedule.order):
        stages = schedule.stages_of(rank)
        tones = [
            tuple(action.pipe if len(schedule.owner) > 1 else stages.index(action.stage) for action in entry.parts)
            for entry in row
        ]
        rows.append(
            tuple(
                Block(played.starts[entry.parts[0]], played.ends[entry.parts[0]], entry.parts, tone)
                for entry, tone in zip(row, tones, strict=True)
            )
        )
    worst = max(played.bubble) / played.makespan
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micro_batches} "
        f"micro-batches, time {played.makespan:g}, bubble {worst:.1%}"
    )
    num_tones = 1 + max(tone for row in rows for block in row for tone in block.tones)
    return Chart(title, tuple(rows), tuple(map(_in_flight, rows)), played.makespan, num_tones)


def _in_flight(row: Sequence[Block]) -> tuple[tuple[float, int], ...]:
    changes = [(0.0, 0)]
    keeps = any(action.kind in ("B", "I") for block in row for action in block.parts)
    for block in row:
        for action in block.parts:
            if action.kind == "F":
                changes.append((block.start, 1))
            if action.kind in ("B", "I") or not keeps:
                changes.append((block.end, -1))
    curve: list[tuple[float, int]] = []
    held = 0
    for time, change in sorted(changes):  # at one time, what ends comes first
        held += change
        curve.append((time, held))
    return tuple(curve)


def color_of(kind: str, tone: int, num_tones: int) -> tuple[int, int, int]:
    """Return the red, green and blue, 0 to 255, of an action's box."""
    lightness = _LIGHTEST * tone / max(1, num_tones - 1)
    red, green, blue = (round(part + (255 - part) * lightness) for part in _COLORS[kind])
    return red, green, blue


def is_dark(color: tuple[int, int, int]) -> bool:
    """Whether text on `color` has to be white."""
    red, green, blue = color
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def describe(rank: int, block: Block) -> str:
    """Return what a block is, in words, for whoever points at it."""
    parts = [
        f"{action}: {NAMES[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}"
        for action in block.parts
    ]
    return f"rank {rank}, {block.start:g} to {block.end:g}\n" + "\ntogether with\n".join(parts)

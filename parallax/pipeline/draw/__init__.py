"""Gantt charts of a schedule: a row for each rank, a colour for each kind of action, bubbles left blank, in flight below.

    chart = chart_of(schedule, simulate(schedule, costs))
    to_text(chart, width=100)               for a terminal (a rich.text.Text)
    to_html([chart])                        one file, with details under the pointer
    save_figure([chart], path, "png")       PNG or SVG, by matplotlib

Actions of one kind have two tones: of the pipe from the other end, or of a rank's second stage. A pair is a box with both of
its parts. A chart is plain data, made of (rank, entry, start, end): what a real step recorded is drawn in the same way
(`chart_of_trace`), and several charts in one file have one scale of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parallax.pipeline.actions import Action, Entry, Schedule
from parallax.pipeline.simulator import Simulation
from parallax.pipeline.trace import RUN, Trace

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
    num_tones: how many tones a colour has.
    lighter: what the lighter tones are, in words; empty if there is one tone.
    waited: for each rank how long it waited inside of its blocks, as pairs do for what their backward takes; empty for not at all.
    """

    title: str
    rows: tuple[tuple[Block, ...], ...]
    in_flight: tuple[tuple[tuple[float, int], ...], ...]
    end: float
    num_tones: int
    lighter: str = ""
    waited: tuple[float, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """The kinds of actions that occur, in the order of `NAMES`."""
        used = {action.kind for row in self.rows for block in row for action in block.parts}
        return [kind for kind in NAMES if kind in used]

    @property
    def has_pairs(self) -> bool:
        """Whether a rank does two actions at once."""
        return any(len(block.parts) > 1 for row in self.rows for block in row)

    def idle(self, rank: int) -> float:
        """Return which part of the time `rank` did nothing."""
        waited = self.waited[rank] if self.waited else 0.0
        return 1 - (sum(block.end - block.start for block in self.rows[rank]) - waited) / self.end

    @property
    def shortest(self) -> float:
        """The shortest time that a block takes."""
        times = [block.end - block.start for row in self.rows for block in row]
        return min((time for time in times if time > 0), default=self.end)

    @property
    def most_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each rank holds."""
        return tuple(max(count for _, count in curve) for curve in self.in_flight)


def chart_of(schedule: Schedule, played: Simulation, title: str = "") -> Chart:
    """Return the chart of a schedule that was simulated; its title says sizes, time and bubble, after `title`."""
    rows = [
        (rank, entry, played.starts[entry.parts[0]], played.ends[entry.parts[0]])
        for rank, row in enumerate(schedule.order)
        for entry in row
    ]
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
    worst = max(played.bubble) / played.makespan
    title = f"{title or schedule.name}: {sizes}, time {played.makespan:g}, bubble {worst:.1%}"
    return chart_of_rows(title, schedule.num_ranks, rows)


def chart_of_rows(title: str, num_ranks: int, rows: Iterable[tuple[int, Entry, float, float]]) -> Chart:
    """Return the chart of (rank, entry, start, end), in any order; the time axis begins at 0."""
    entries: list[list[tuple[float, float, Entry]]] = [[] for _ in range(num_ranks)]
    for rank, entry, start, end in rows:
        entries[rank].append((start, end, entry))
    actions = [[part for _, _, entry in row for part in entry.parts] for row in entries]
    pipes = {action.pipe for row in actions for action in row}
    blocks = []
    for row, done in zip(entries, actions, strict=True):
        stages = sorted({action.stage for action in done})
        blocks.append(
            tuple(
                Block(
                    start,
                    end,
                    entry.parts,
                    tuple(part.pipe if len(pipes) > 1 else stages.index(part.stage) for part in entry.parts),
                )
                for start, end, entry in sorted(row, key=lambda each: each[:2])
            )
        )
    num_tones = 1 + max(tone for row in blocks for block in row for tone in block.tones)
    lighter = ""
    if num_tones > 1:
        lighter = (
            "from the last rank"
            if len(pipes) > 1
            else f"the rank's {'second stage' if num_tones == 2 else 'later stages'}"
        )
    end = max(block.end for row in blocks for block in row)
    return Chart(title, tuple(blocks), tuple(map(_in_flight, blocks)), end, num_tones, lighter)


def chart_of_trace(trace: Trace) -> Chart:
    """Return the chart of what ran, on an axis in seconds."""
    rows = [(rank, event.what, event.start, event.end) for rank, event in trace.events(RUN)]
    drawn = [sum(end - start for at, _, start, end in rows if at == rank) for rank in range(len(trace.records))]
    busy = trace.busy()
    worst = 1 - min(busy) / trace.makespan
    title = f"{trace.name}, recorded: {len(busy)} ranks, time {trace.makespan:g} s, bubble {worst:.1%}"
    waited = tuple(all_of_it - work for all_of_it, work in zip(drawn, busy, strict=True))
    return replace(chart_of_rows(title, len(trace.records), rows), waited=waited)


def _in_flight(row: Sequence[Block]) -> tuple[tuple[float, int], ...]:
    changes = {0.0: 0}  # of the number held, by time, rounded: what ends when another begins is no change
    keeps = any(action.kind in ("B", "I") for block in row for action in block.parts)
    for block in row:
        for action in block.parts:
            if action.kind == "F":
                changes[_rounded(block.start)] = changes.get(_rounded(block.start), 0) + 1
            if action.kind in ("B", "I") or not keeps:
                changes[_rounded(block.end)] = changes.get(_rounded(block.end), 0) - 1
    curve: list[tuple[float, int]] = []
    held = 0
    for time in sorted(changes):
        held += changes[time]
        curve.append((time, held))
    return tuple(curve)


def _rounded(time: float) -> float:
    return float(f"{time:.9g}")


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

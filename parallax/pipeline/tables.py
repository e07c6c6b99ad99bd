"""Schedules as CSV: a row for each rank, a cell for each entry, so that a spreadsheet shows the table and a user can write one.

    0F0,0F1,(0F2|0B0),0B1        number of ranks, stages and micro-batches, and which rank holds which stage, follow from it
    1F0,1B0,1F1,1B1

Empty cells are skipped, so that columns can stand for time. The compute-only CSV of torch.distributed.pipelining is of this
form; its pairs, `(0F2;0B0)OVERLAP_F_B`, are read as well, and where it reduces gradients is passed over. Its other form, with
all communication, is refused: here that follows from the table.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from parallax.errors import ConfigError
from parallax.pipeline.actions import Entry, Schedule, parse_entry

_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|SEND_[FB]|RECV_[FB])\d*")
_SKIPPED = re.compile(r"\s*|\d+REDUCE_GRAD")


def to_csv(schedule: Schedule) -> str:
    """Return the table of `schedule`; `parse_csv` reads it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(entry) for entry in row] for row in schedule.order)
    return text.getvalue()


def read_csv(path: str | Path) -> Schedule:
    """Return the schedule in a file, named after it; raises ConfigError for what is no table, but does not check the table."""
    path = Path(path)
    try:
        return parse_csv(path.read_text(encoding="utf-8-sig"), path.stem)
    except OSError as error:
        raise ConfigError(f"schedule {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"schedule {path} is no text file") from error


def parse_csv(text: str, name: str) -> Schedule:
    """Return the schedule that `text` holds; raises ConfigError for what is no table, naming rank and column."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except csv.Error as error:
        raise ConfigError(f"schedule {name} is no CSV: {error}") from error
    order = tuple(
        tuple(_cell(name, rank, column, cell) for column, cell in enumerate(row) if not _SKIPPED.fullmatch(cell))
        for rank, row in enumerate(rows)
    )
    actions = [action for row in order for entry in row for action in entry.parts]
    if not actions:
        raise ConfigError(f"schedule {name} holds no actions; write a row for each rank, as in 0F0,0F1,0B0,0B1")
    return Schedule(
        name,
        num_stages=1 + max(action.stage for action in actions),
        num_ranks=len(rows),
        num_micro_batches=1 + max(action.micro_batch for action in actions),
        order=order,
        owner=_owners(name, order),
        forward_only=all(action.kind == "F" for action in actions),
    )


def _cell(name: str, rank: int, column: int, cell: str) -> Entry:
    where = f"schedule {name}, row of rank {rank}, column {column}"
    if _COMMUNICATION.fullmatch(cell.strip()):
        raise ConfigError(
            f"{where}: {cell.strip()} is communication, which is derived here; give the table without it (compute_only)"
        )
    try:
        return parse_entry(cell)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _owners(name: str, order: tuple[tuple[Entry, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return which rank does each stage of each pipe."""
    found: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(order):
        for action in (action for entry in row for action in entry.parts):
            other = found.setdefault((action.pipe, action.stage), rank)
            if other != rank:
                raise ConfigError(
                    f"schedule {name}: rank {other} and rank {rank} both do stage {action.stage} ({action}); "
                    "a stage has one rank, unless it is on another pipe (b1F3)"
                )
    pipes = sorted({pipe for pipe, _ in found})
    stages = sorted({stage for _, stage in found})
    for wanted, missing in ((pipe, stage) for pipe in range(len(pipes)) for stage in range(len(stages))):
        if (wanted, missing) not in found:
            where = f" of pipe {chr(ord('a') + wanted)}" if len(pipes) > 1 else ""
            raise ConfigError(f"schedule {name}: no rank does stage {missing}{where}, and there are later ones")
    return tuple(tuple(found[pipe, stage] for stage in stages) for pipe in pipes)

"""Schedules as CSV: a row for each rank, a cell for each entry, so that a spreadsheet shows the table and a user can write one.

    0F0,0F1,(0F2|0B0),0B1        number of ranks, stages and micro-batches, and which rank holds which stage, follow from it
    1F0,1B0,1F1,1B1

Empty cells are skipped, so that columns can stand for time. Both CSV forms of torch.distributed.pipelining are read as well: its
pairs, `(0F2;0B0)OVERLAP_F_B`, are pairs, and the communication that its `compute_comms` form also lists (SEND, RECV, UNSHARD,
RESHARD, REDUCE_GRAD) is passed over, since here that follows from the table.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from parallax.errors import ConfigError
from parallax.pipeline.actions import Entry, Schedule, parse_entry
from parallax.pipeline.check import check_schedule

_SKIPPED = re.compile(r"\s*(\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*\s*)?")


def to_csv(schedule: Schedule) -> str:
    """Return the table of `schedule`; `parse_csv` reads it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(entry) for entry in row] for row in schedule.order)
    return text.getvalue()


def read_schedule(path: str | Path, num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule in a file, proved, for a run of these sizes; raises ConfigError, also if it is for others."""
    schedule = read_csv(path)
    check_schedule(schedule)
    if schedule.num_ranks != num_ranks:
        raise ConfigError(
            f"schedule {path} has {schedule.num_ranks} rows, one for each pipeline rank, and --pp is {num_ranks}; "
            f"use --pp {schedule.num_ranks}, or a table with {num_ranks} rows"
        )
    if schedule.num_micro_batches != num_micro_batches:
        raise ConfigError(
            f"schedule {path} is a table for {schedule.num_micro_batches} micro-batches per step, not {num_micro_batches} "
            f"(--global-batch / (--micro-batch * dp)); use a --global-batch that makes {schedule.num_micro_batches}, or "
            "another table"
        )
    if schedule.forward_only:
        raise ConfigError(
            f"schedule {path} has forwards only, so nothing would be trained; add the backwards, as in 0F0,0B0"
        )
    return schedule


def read_csv(path: str | Path) -> Schedule:
    """Return the schedule in a file, named after it; raises ConfigError for what is no table, but does not check the table."""
    path = Path(path)
    try:
        return parse_csv(path.read_text(encoding="utf-8-sig"), path.stem, f"{path.name}, ")
    except OSError as error:
        raise ConfigError(f"schedule {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"schedule {path} is no text file") from error


def parse_csv(text: str, name: str, file: str = "") -> Schedule:
    """Return the schedule that `text` holds; raises ConfigError for what is no table, naming line and column, both from 1."""
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ConfigError(f"schedule {name}, {file}line {reader.line_num} is no CSV: {error}") from error
    order: list[tuple[Entry, ...]] = []
    origin: list[tuple[str, ...]] = []
    for line, row in rows:
        cells = [(f"{file}line {line}, column {column}", cell) for column, cell in enumerate(row, start=1)]
        cells = [(where, cell) for where, cell in cells if not _SKIPPED.fullmatch(cell)]
        order.append(tuple(_entry(name, len(order), where, cell) for where, cell in cells))
        origin.append(tuple(where for where, _ in cells))
    actions = [action for entries in order for entry in entries for action in entry.parts]
    if not actions:
        raise ConfigError(f"schedule {name} holds no actions; write a row for each rank, as in 0F0,0F1,0B0,0B1")
    return Schedule(
        name,
        num_stages=1 + max(action.stage for action in actions),
        num_ranks=len(rows),
        num_micro_batches=1 + max(action.micro_batch for action in actions),
        order=tuple(order),
        owner=owners_of(name, tuple(order), tuple(origin)),
        forward_only=all(action.kind == "F" for action in actions),
        origin=tuple(origin),
    )


def _entry(name: str, rank: int, where: str, cell: str) -> Entry:
    try:
        return parse_entry(cell)
    except ConfigError as error:
        raise ConfigError(f"schedule {name}, rank {rank} ({where}): {error}") from error


def owners_of(
    name: str, order: tuple[tuple[Entry, ...], ...], origin: tuple[tuple[str, ...], ...] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return which rank does each stage of each pipe; raises ConfigError if that is two ranks, or none."""
    found: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(order):
        for place, action in ((place, action) for place, entry in enumerate(row) for action in entry.parts):
            other = found.setdefault((action.pipe, action.stage), rank)
            if other != rank:
                where = f" ({origin[rank][place]})" if origin else ""
                raise ConfigError(
                    f"schedule {name}, rank {rank}, position {place}{where}, {action}: rank {other} does stage "
                    f"{action.stage} too; a stage has one rank, unless it is on another pipe (b1F3)"
                )
    pipes = sorted({pipe for pipe, _ in found})
    stages = sorted({stage for _, stage in found})
    for wanted, missing in ((pipe, stage) for pipe in range(len(pipes)) for stage in range(len(stages))):
        if (wanted, missing) not in found:
            where = f" of pipe {chr(ord('a') + wanted)}" if len(pipes) > 1 else ""
            raise ConfigError(f"schedule {name}: no rank does stage {missing}{where}, and there are later ones")
    return tuple(tuple(found[pipe, stage] for stage in stages) for pipe in pipes)

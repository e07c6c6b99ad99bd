"""TensorBoard reads what a run wrote, also over a time in which nothing could be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallax.training.event_file import EventFile


def _read(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_what_is_written_is_what_tensorboard_reads(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events")
    for step in (1, 2, 3):
        file.add(step, [("loss", step / 4), ("phases/dp", 0.5)])
    # At once, and not when the file is closed.
    assert _read(tmp_path / "events", "loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [step for step, _ in _read(tmp_path / "events", "phases/dp")] == [1, 2, 3]


def test_a_run_that_goes_on_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = EventFile(tmp_path)
    for step in (1, 2, 3):
        first.add(step, [("loss", 1.0)])
    first.close()
    second = EventFile(tmp_path, first_step=3)
    second.add(3, [("loss", 2.0)])
    assert _read(tmp_path, "loss") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_steps_that_could_not_be_written_are_missing_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    file = EventFile(folder)
    file.add(1, [("loss", 1.0)])
    (written,) = folder.iterdir()
    with open("/dev/full", "wb", buffering=0) as full:
        whole, file._file = file._file, full
        with pytest.raises(OSError, match="No space left"):
            file.add(2, [("loss", 2.0)])
    assert whole is not None
    whole.close()
    with written.open("ab") as cut:  # a record of which only a part could be written
        cut.write(b"\x20\0\0\0")
    file.add(3, [("loss", 3.0)])
    assert _read(folder, "loss") == [(1, 1.0), (3, 3.0)]

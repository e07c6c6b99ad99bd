"""Schedules as CSV: written and read back, torch's files, and files that are no table."""

from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.pipeline import ALL_SCHEDULES, check_schedule, forward_only, make_schedule
from parallax.pipeline.tables import parse_csv, read_csv, to_csv
from tests.pipeline.torch_lists import rows_of, write_csv


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_table_reads_back_as_the_same_schedule(name: str) -> None:
    for ranks, micro_batches in [(2, 4), (4, 12)]:
        schedule = make_schedule(name, ranks, micro_batches)
        assert parse_csv(to_csv(schedule), name) == schedule


def test_a_table_without_backwards_reads_back_as_forward_only() -> None:
    assert parse_csv(to_csv(forward_only(3, 2)), "forward-only") == forward_only(3, 2)


@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_torchs_own_file_of_a_schedule_is_read_as_that_schedule(
    tmp_path: Path, name: str, theirs: str, chunks: int
) -> None:
    write_csv(rows_of(theirs, 4, 12, chunks), tmp_path / f"{name}.csv")
    schedule = read_csv(tmp_path / f"{name}.csv")
    assert schedule == make_schedule(name, 4, 12)
    check_schedule(schedule)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "schedule mine holds no actions"),
        (",,\n", "schedule mine holds no actions"),
        ("0F0,x\n", "schedule mine, row of rank 0, column 1: 'x' is not an action"),
        ("0F0\n1F0,(1F1|1F2)\n", "row of rank 1, column 1: .* is not a pair; it takes one forward and one whole"),
        ("0F0,0SEND_F0,0B0\n", "column 1: 0SEND_F0 is communication, which is derived here"),
        ("0UNSHARD,0F0,0B0\n", "column 0: 0UNSHARD is communication"),
        ("0F0,1F0\n1F1\n", "rank 0 and rank 1 both do stage 1"),
        ("0F0,0B0\n2F0,2B0\n", "no rank does stage 1, and there are later ones"),
        ("0F0,0B0\nb1F1,b1B1\n1F0,1B0\n", "no rank does stage 0 of pipe b"),
        ('0F0,"0B0\n', "is no CSV"),
    ],
)
def test_what_is_no_table_is_said_with_rank_and_column(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_csv(text, "mine")


def test_a_table_that_is_wrong_in_itself_is_left_to_the_checker() -> None:
    schedule = parse_csv("0F0,,0F1,0B0\n", "mine")
    with pytest.raises(ConfigError, match="schedule mine, rank 0, position 1, 0F1: for this micro-batch"):
        check_schedule(schedule)


def test_files_that_cannot_be_read_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "picture.csv").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(ConfigError, match="is no text file"):
        read_csv(tmp_path / "picture.csv")

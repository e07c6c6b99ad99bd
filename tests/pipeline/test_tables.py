"""Schedules as CSV: written and read back, torch's files, and files that are no table."""

from pathlib import Path

import pytest

from parallax.errors import ConfigError
from parallax.pipeline import ALL_SCHEDULES, forward_only, make_schedule
from parallax.pipeline.tables import parse_csv, read_csv, read_schedule, to_csv
from tests.pipeline.torch_lists import rows_of, texts_of, write_csv


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_table_reads_back_as_the_same_schedule(name: str) -> None:
    for ranks, micro_batches in [(2, 4), (4, 12)]:
        schedule = make_schedule(name, ranks, micro_batches)
        assert parse_csv(to_csv(schedule), name) == schedule


def test_a_table_without_backwards_reads_back_as_forward_only() -> None:
    assert parse_csv(to_csv(forward_only(3, 2)), "forward-only") == forward_only(3, 2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
        (None, "ScheduleInterleaved1F1B", 4),
        (None, "ScheduleInterleavedZeroBubble", 2),
        (None, "ScheduleLoopedBFS", 2),
    ],
)
def test_both_of_torchs_own_files_of_a_schedule_are_read_as_that_schedule(
    tmp_path: Path, name: str | None, theirs: str, chunks: int, format: str, ranks: int
) -> None:
    rows = rows_of(theirs, ranks, 12, chunks)
    path = tmp_path / f"{name}.csv"
    write_csv(rows, path, format, micro_batches=12)
    text = path.read_text()
    assert ("SEND_F" in text) == ("REDUCE_GRAD" in text and "UNSHARD" in text) == (format == "compute_comms")
    schedule = read_schedule(path, ranks, 12)
    assert [list(map(str, row)) for row in schedule.order] == texts_of(rows)
    if name is not None:
        assert schedule == make_schedule(name, ranks, 12)


@pytest.mark.parametrize(("theirs", "chunks"), [("ScheduleZBVZeroBubble", 2), ("ScheduleDualPipeV", 2)])
def test_torchs_deferred_receives_do_no_harm_here_where_messages_follow_from_the_table(
    tmp_path: Path, theirs: str, chunks: int
) -> None:
    paths = {deferred: tmp_path / f"{deferred}.csv" for deferred in (False, True)}
    for deferred, path in paths.items():
        write_csv(rows_of(theirs, 4, 12, chunks), path, "compute_comms", 12, defer_receives=deferred)
    assert paths[False].read_text() != paths[True].read_text()
    assert read_schedule(paths[False], 4, 12).order == read_schedule(paths[True], 4, 12).order


def test_torchs_table_of_1f1b_is_refused_since_its_last_rank_counts_micro_batches_from_1(tmp_path: Path) -> None:
    """Nothing in torch runs this table: its 1F1B is a loop of its own, beside the table that it prints."""
    write_csv(rows_of("Schedule1F1B", 4, 8), tmp_path / "theirs.csv")
    assert read_csv(tmp_path / "theirs.csv").order[:3] == make_schedule("1f1b", 4, 8).order[:3]
    with pytest.raises(ConfigError, match=r"theirs.csv, line 4, column"):
        read_schedule(tmp_path / "theirs.csv", 4, 8)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "schedule mine holds no actions"),
        (",,\n", "schedule mine holds no actions"),
        ("0F\u0661,0B0\n", r"\(line 1, column 1\): '0F\u0661' is not an action"),
        ("0F0,x\n", r"schedule mine, rank 0 \(line 1, column 2\): 'x' is not an action"),
        (
            "0F0\n\n1F0,,(1F1|1F2)\n",
            r"rank 1 \(line 3, column 3\): .* is not a pair; it takes one forward and one whole",
        ),
        ("0F0,SEND_F0,0B0\n", r"\(line 1, column 2\): 'SEND_F0' is not an action"),
        ("0F0,1F0\n,1F1\n", r"schedule mine, rank 1, position 0 \(line 2, column 2\), 1F1: rank 0 does stage 1 too"),
        ("0F0,0B0\n2F0,2B0\n", "no rank does stage 1, and there are later ones"),
        ("0F0,0B0\nb1F1,b1B1\n1F0,1B0\n", "no rank does stage 0 of pipe b"),
        ('0F0\n1F0,"0B0\n', "line 2 is no CSV"),
    ],
)
def test_what_is_no_table_is_said_with_line_and_column(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_csv(text, "mine")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "0F0,,0F1,0B0\n",
            "schedule mine, rank 0, position 1 (mine.csv, line 1, column 3), 0F1: for this micro-batch the stage does 0F1; "
            "it must do F and B, or F, I and W",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n",
            "schedule mine comes to a deadlock: rank 0, position 1 (mine.csv, line 1, column 2): 0B0 waits for 1B0; "
            "rank 1, position 1 (mine.csv, line 2, column 2): 1F1 waits for 0F1",
        ),
        ("0F0,0B0\n", "schedule PATH is a table for 1 micro-batches per step, not 2 (--global-batch / "),
        ("0F0\n1F0\n", "schedule PATH is a table for 1 micro-batches"),
        ("0F0\n1F0\n2F0\n", "schedule PATH has 3 rows, one for each pipeline rank, and --pp is "),
        ("0F0,0F1\n1F0,1F1\n", "schedule PATH has forwards only, so nothing would be trained; add the backwards"),
        ("0F0,0B0,0F1,0B1\n,\n", "schedule mine, rank 1: it does nothing; each rank needs a stage"),
    ],
)
def test_a_table_that_does_not_fit_a_run_is_one_sentence_before_it_starts(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_schedule(path, min(2, text.count("\n")), 2)
    assert len(caught.value.problems) == 1 and str(caught.value).startswith(sentence.replace("PATH", str(path)))


def test_files_that_cannot_be_read_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "picture.csv").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(ConfigError, match="is no text file"):
        read_csv(tmp_path / "picture.csv")

"""The schedules beyond gpipe and 1f1b: against torch's tables, the papers' properties, and every size they allow."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.pipeline import ALL_SCHEDULES, SCHEDULES, Schedule, check_schedule, make_schedule, simulate
from parallax.pipeline.check import check_memory
from tests.pipeline.torch_lists import rows_of, texts_of

SIZES = [(2, 4), (4, 8), (4, 12), (8, 16)]


def texts(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule.order]


def drawn(schedule: Schedule) -> list[str]:
    """Return a line for each rank, two characters for each unit of time when every cost is 1."""
    played = simulate(schedule)
    lines = []
    for rank in range(schedule.num_ranks):
        line = ["  "] * int(played.makespan)
        for action in schedule.actions_of(rank):
            line[int(played.starts[action])] = f"{action.kind}{action.micro_batch}"
        lines.append(" ".join(line).rstrip())
    return lines


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 4),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_the_tables_equal_torchs_action_for_action(
    name: str, theirs: str, chunks: int, ranks: int, micro_batches: int
) -> None:
    mine = make_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else None)
    assert texts(mine) == texts_of(rows_of(theirs, ranks, micro_batches, chunks))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 10), (4, 3), (2, 5), (3, 7)])
def test_interleaved_equals_torchs_where_micro_batches_are_no_multiple_of_the_ranks(
    ranks: int, micro_batches: int
) -> None:
    if micro_batches % max(1, micro_batches // ranks):
        assert check_schedule(make_schedule("interleaved", ranks, micro_batches))  # torch refuses these
    else:
        theirs = texts_of(rows_of("ScheduleInterleaved1F1B", ranks, micro_batches, 2))
        assert texts(make_schedule("interleaved", ranks, micro_batches)) == theirs


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 20), (8, 16), (8, 20), (12, 26)])
def test_each_half_of_dualpipe_is_torchs_dualpipev_over_half_the_ranks(ranks: int, micro_batches: int) -> None:
    """DualPipe seen from one end is DualPipeV, whose way back up stands for the other end's stages on the same rank."""
    half_ranks, half = ranks // 2, micro_batches // 2
    if half < 2 * half_ranks:
        pytest.skip("torch asks for more micro-batches than DualPipeV needs")
    folded = rows_of("ScheduleDualPipeV", half_ranks, half, 2)
    schedule = make_schedule("dualpipe", ranks, micro_batches)
    for rank in range(ranks):
        hops = min(rank, ranks - 1 - rank)
        down_is_near = rank < half_ranks

        def translated(action, rank=rank, hops=hops, down_is_near=down_is_near) -> str:
            if action.sub_actions:
                return "({}|{})".format(*map(translated, action.sub_actions))
            near = action.stage_index == hops
            stage, is_down = (hops if near else ranks - 1 - hops), near == down_is_near
            number = action.microbatch_index + (0 if is_down else half)
            return f"{'' if is_down else 'b'}{stage}{action.computation_type.value}{number}"

        assert list(map(str, schedule.order[rank])) == [translated(action) for action in folded[hops]]


def test_dualpipes_eight_steps_are_those_of_the_middle_and_the_outer_rank() -> None:
    rows = texts(make_schedule("dualpipe", 4, 8))
    assert " ".join(rows[0]) == (
        "0F0 0F1 0F2 b3F4 b3I4 b3W4 b3F5 (0F3|b3B5) (b3F6|0B0) b3B6 (b3F7|0B1) b3B7 0I2 0W2 0I3 0W3"
    )
    assert " ".join(rows[2]) == (
        "b1F4 2F0 b1F5 2F1 b1F6 2B0 (2F2|b1B4) (b1F7|2B1) (2F3|b1B5) 2B2 b1B6 2I3 b1I7 2W3 b1W7"
    )


def test_zb_h1_looks_as_its_module_draws_it() -> None:
    assert drawn(make_schedule("zb-h1", 3, 4)) == [
        "F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "   F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "      F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaved_looks_as_its_module_says() -> None:
    assert [" ".join(row) for row in texts(make_schedule("interleaved", 2, 4))] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@given(
    name=st.sampled_from(["interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipev"]),
    ranks=st.integers(1, 6),
    micro_batches=st.integers(1, 14),
    chunks=st.integers(2, 4),
)
@settings(max_examples=80, deadline=None)
def test_every_size_is_proved_right_or_refused_with_sizes_that_work(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    try:
        schedule = make_schedule(name, ranks, micro_batches, chunks if name == "interleaved" else None)
    except ConfigError as error:
        words = str(error).split("; use ")[1].replace(",", "").split()
        sizes = [int(word) for word in words if word.isdigit()]
        assert name.startswith("dualpipe") and sizes
        for size in sizes:
            ranks, micro_batches = (size, 2 * size) if "number of ranks" in str(error) else (ranks, size)
            check_schedule(make_schedule(name, ranks, micro_batches))
        return
    check_schedule(schedule)
    held = simulate(schedule).peak_in_flight
    check_memory(schedule, max(held))
    with pytest.raises(ConfigError, match=f"more than {max(held) - 1}"):
        check_memory(schedule, max(held) - 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("dualpipe", 3, 8), "needs an even number of ranks .*; use 2 or 4, or dualpipev"),
        (("dualpipe", 1, 8), "needs an even number of ranks .*; use 2, or dualpipev"),
        (("dualpipe", 4, 6), "at least 2 for each of the 4 ranks, not 6 .*; use 8, or 1f1b"),
        (("dualpipe", 4, 11), "an even number of micro-batches .*; use 10 or 12"),
        (("dualpipev", 4, 7), "; use 8, or 1f1b"),
        (("interleaved", 4, 8, 1), "at least 2 stages on each rank"),
        (("zb-v", 4, 8, 2), "leave out --chunks"),
        (("zb-h2", 4, 8), "is unknown; use gpipe, 1f1b, interleaved"),
        (("zb-v", 0, 8), "at least 1 stage"),
    ],
)
def test_sizes_and_names_that_do_not_exist_are_refused_with_the_nearest_that_do(
    arguments: tuple, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_schedule(*arguments)


def test_what_a_run_can_use_is_what_the_registry_says_it_can() -> None:
    assert {name for name, record in ALL_SCHEDULES.items() if not record.not_run} == set(SCHEDULES)
    assert all(ALL_SCHEDULES[name].make is make for name, make in SCHEDULES.items())

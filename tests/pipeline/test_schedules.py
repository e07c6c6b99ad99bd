"""The schedules beyond gpipe and 1f1b: against torch's tables, the papers' properties, and every size they allow."""

import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.pipeline import ALL_SCHEDULES, Costs, Schedule, check_schedule, make_schedule, simulate
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
    name=st.sampled_from([*ALL_SCHEDULES]),
    ranks=st.integers(1, 6),
    micro_batches=st.integers(1, 14),
    chunks=st.integers(2, 4),
)
@settings(max_examples=80, deadline=None)
def test_every_size_is_proved_right_or_refused_with_sizes_that_work(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    try:
        schedule = make_schedule(name, ranks, micro_batches, chunks if ALL_SCHEDULES[name].takes_chunks else None)
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
        (("zb-h2", 4, 8), "is unknown; use gpipe, 1f1b, 1f1b-eager, interleaved"),
        (("zb-v", 0, 8), "at least 1 stage"),
    ],
)
def test_sizes_and_names_that_do_not_exist_are_refused_with_the_nearest_that_do(
    arguments: tuple, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_schedule(*arguments)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_what_a_record_says_without_a_table_is_so_in_the_table(name: str) -> None:
    record = ALL_SCHEDULES[name]
    for ranks in (2, 4):
        least = record.constraints.least_micro_batches(ranks)
        with pytest.raises(ConfigError):
            make_schedule(name, ranks, least - 1)
        for micro_batches in (least + 6, least + 6 + record.constraints.micro_batches_multiple):
            schedule = make_schedule(name, ranks, micro_batches)
            assert schedule.num_stages == record.constraints.num_stages(ranks)
            entries = [entry for row in schedule.order for entry in row]
            assert record.splits_backward == any(part.kind == "I" for entry in entries for part in entry.parts)
            assert record.pairs == any(len(entry.parts) == 2 for entry in entries)
            assert record.holds_twice == (len(schedule.owner) == 2)
        if record.takes_chunks:
            assert (
                make_schedule(name, ranks, least, 3).num_stages == record.constraints.num_stages(ranks, 3) == 3 * ranks
            )


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_paired_interleaved_does_the_same_work_as_interleaved_with_one_forward_more_to_begin_with(
    ranks: int, micro_batches: int, chunks: int
) -> None:
    paired = make_schedule("interleaved-paired", ranks, micro_batches, chunks)
    plain = make_schedule(
        *(("interleaved",) if chunks > 1 else ("1f1b-eager",)), ranks, micro_batches, *[chunks][: chunks > 1]
    )
    for rank in range(ranks):
        for kind in "FB":
            works = [[a for a in schedule.actions_of(rank) if a.kind == kind] for schedule in (paired, plain)]
            assert works[0] == works[1]
    held, without = simulate(paired).peak_in_flight, simulate(plain).peak_in_flight
    assert [most - 1 for most in held] == [min(most, chunks * micro_batches - 1) for most in without]


def test_paired_interleaved_looks_as_its_module_says() -> None:
    assert [" ".join(row) for row in texts(make_schedule("interleaved-paired", 2, 4, 1))] == [
        "0F0 0F1 0F2 (0F3|0B0) 0B1 0B2 0B3",
        "1F0 (1F1|1B0) (1F2|1B1) (1F3|1B2) 1B3",
    ]


@pytest.mark.parametrize("paired", [False, True])
def test_no_other_way_to_group_micro_batches_is_faster_where_they_are_no_multiple_of_the_ranks(
    paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Megatron-LM's: groups of the ranks' number and a rest, or the rest in the last group or in the first."""
    module = sys.modules["parallax.pipeline.schedules.interleaved"]
    name, costs = ("interleaved-paired", Costs(pair=2.5)) if paired else ("interleaved", Costs())
    slower = refused = 0
    for ranks, micro_batches in [(2, 3), (3, 5), (4, 6), (4, 7), (4, 9), (4, 3), (6, 14), (8, 19)]:
        mine = simulate(make_schedule(name, ranks, micro_batches, 3), costs).makespan
        whole = max(1, micro_batches // ranks)
        rest = max(0, micro_batches - whole * ranks)
        for edges in (
            [*range(0, micro_batches, ranks), micro_batches],
            [*range(0, whole * ranks, ranks), micro_batches],
            [0, *range(rest + ranks, micro_batches, ranks), micro_batches],
        ):
            groups = [range(start, end) for start, end in pairwise(edges)]
            assert [number for group in groups for number in group] == list(range(micro_batches))
            with monkeypatch.context() as patch:
                patch.setattr(module, "_groups", lambda *_, groups=groups: groups)
                other = make_schedule(name, ranks, micro_batches, 3)
            try:
                check_schedule(other)
            except ConfigError:  # a smaller last group can come to a deadlock
                refused += 1
                continue
            theirs = simulate(other, costs).makespan
            assert mine <= theirs
            slower += mine < theirs
    assert slower >= 4 and refused >= 6

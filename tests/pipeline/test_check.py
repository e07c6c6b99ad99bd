"""The checker: right tables pass, each kind of broken one is named, and it agrees with running them."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.pipeline import (
    ALL_SCHEDULES,
    SCHEDULES,
    Action,
    Pair,
    Schedule,
    check_schedule,
    forward_only,
    make_schedule,
)
from parallax.pipeline.check import check_program
from parallax.pipeline.lower import Message, Program, Receive, Send, lower_schedule, post_early
from parallax.pipeline.tables import parse_csv
from parallax.tensor_parallel.weight_gradients import attach_queue
from tests.pipeline.in_process import executors_in_process, run_in_process
from tests.pipeline.toy import gradients_of, make_batch, make_layers, make_stages, plain_losses_and_gradients

ONE_STAGE = ["gpipe", "1f1b", "1f1b-eager", "zb-h1"]  # on each rank, and any sizes
SIZES = {"stages": st.integers(1, 7), "micro_batches": st.integers(1, 9)}


@given(name=st.sampled_from([*ONE_STAGE, "forward-only"]), **SIZES)
@settings(max_examples=60, deadline=None)
def test_every_generated_table_passes_for_any_sizes(name: str, stages: int, micro_batches: int) -> None:
    program = check_schedule({**SCHEDULES, "forward-only": forward_only}[name](stages, micro_batches))
    sends = sum(isinstance(step, Send) for row in program.steps for step in row)
    assert sends == (stages - 1) * micro_batches * (1 if name == "forward-only" else 2)


def edited(schedule: Schedule, rank: int, *actions: str) -> Schedule:
    """Return `schedule` with another row for `rank`."""
    order = list(schedule.order)
    order[rank] = tuple(map(Action.parse, actions))
    return replace(schedule, name="mine", order=tuple(order))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            ["1F0", "1B0", "1F1", "1F1", "1B1"],
            "schedule mine, rank 1, position 3, 1F1: it was done before, at position 2",
        ),
        (["1F0", "1B0", "0F1", "1B1"], "schedule mine, rank 1, position 2, 0F1: its stage belongs to rank 0"),
        (["1F0", "1B0", "1F1", "1B1", "2F0"], "schedule mine, rank 1, position 4, 2F0: stages go from 0 to 1"),
        (["1F0", "1B0", "1F1", "1B1", "1F2"], "schedule mine, rank 1, position 4, 1F2: micro-batches go from 0 to 1"),
        (["1F0", "1B0", "1F1", "1B1", "b1F1"], "schedule mine, rank 1, position 4, b1F1: there are 1 pipes"),
        (
            ["1F0", "1B0", "1F1"],
            "schedule mine, rank 1, position 2, 1F1: for this micro-batch the stage does 1F1; it must",
        ),
        (["1F0", "1B0"], "schedule mine, rank 1: 1F1 is in none of its 2 positions"),
        (
            ["1F0", "1B0", "1B1"],
            "schedule mine, rank 1, position 2, 1B1: for this micro-batch the stage does 1B1; it must",
        ),
        (
            ["1F0", "1B0", "1F1", "1I1"],
            "schedule mine, rank 1, position 3, 1I1: for this micro-batch the stage does 1F1, 1I1",
        ),
        (["1F0", "1B0", "1B1", "1F1"], "schedule mine, rank 1, position 2, 1B1: it needs 1F1, which comes later"),
        (
            ["1F0", "1F1", "1B1", "1W0", "1I0"],
            "schedule mine, rank 1, position 3, 1W0: it needs 1I0, which comes later",
        ),
    ],
)
def test_a_broken_table_is_said_in_one_sentence_with_rank_position_and_action(row: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_schedule(edited(SCHEDULES["1f1b"](2, 2), 1, *row))
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(sentence), caught.value


def test_ranks_pipes_and_micro_batches_that_do_not_add_up_are_errors() -> None:
    schedule = SCHEDULES["gpipe"](2, 2)
    for broken, words in [
        (replace(schedule, order=schedule.order[:1]), "for 2 ranks and lists 1"),
        (replace(schedule, owner=((0, 2),)), "a rank below 2"),
        (replace(schedule, owner=((0,),)), "each of the 2 stages"),
        (replace(schedule, num_micro_batches=3), "never does micro-batch 2"),
        (replace(schedule, forward_only=True), "has no backward"),
        (replace(schedule, num_micro_batches=0), "at least 1"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_schedule(broken)


def test_backwards_in_opposite_order_of_need_are_a_deadlock() -> None:
    schedule = edited(SCHEDULES["1f1b"](2, 2), 0, "0F0", "0B0", "0F1", "0B1")
    check_schedule(schedule)
    with pytest.raises(ConfigError, match=r"deadlock: rank 0, position 1: 0B0 waits for 1B0; rank 1, position 1: 1F1"):
        check_schedule(edited(schedule, 1, "1F0", "1F1", "1B0", "1B1"))


def test_a_bidirectional_table_with_a_split_backward_passes() -> None:
    rows = [
        ["0F0", "0F1", "b1F2", "b1I2", "b1W2", "0B0", "0B1"],
        ["b0F2", "1F0", "1B0", "1F1", "1B1", "b0B2"],
    ]
    order = tuple(tuple(map(Action.parse, row)) for row in rows)
    schedule = Schedule("both-ways", 2, 2, 3, order, ((0, 1), (1, 0)))
    check_schedule(schedule)
    assert schedule.input_of(Action.parse("b0B2")) == Action.parse("b1I2")
    mixed = replace(schedule, order=(order[0], (*order[1][:-1], Action("B", 0, 2))))
    with pytest.raises(ConfigError, match="rank 1, position 5, 0B2: its stage belongs to rank 0"):
        check_schedule(mixed)


def test_receives_in_order_of_use_against_sends_in_order_of_production_are_refused() -> None:
    # Rank 0 makes micro-batches 0, 1, 2 and rank 1 uses them as 0, 2, 1.
    order = (
        tuple(map(Action.parse, ["0F0", "0F1", "0F2", "0B0", "0B2", "0B1"])),
        tuple(map(Action.parse, ["1F0", "1B0", "1F2", "1B2", "1F1", "1B1"])),
    )
    program = check_schedule(Schedule("reordered", 2, 2, 3, order, ((0, 1),)))
    deferred = Program(program.schedule, (program.steps[0], post_early(program.steps[1], 0)))
    with pytest.raises(
        ConfigError, match="message 1 from rank 0 to rank 1 is sent as the result of 0F1 and received as"
    ):
        check_program(deferred)


def test_mirrored_messages_can_still_deadlock_when_sends_block() -> None:
    forward = lower_schedule(SCHEDULES["1f1b"](2, 3))

    def late(row: tuple) -> tuple:
        return post_early(row, 0)

    with pytest.raises(ConfigError, match="deadlocks when sends wait for their receives: 2 ranks are stuck, rank 0 at"):
        check_program(Program(forward.schedule, tuple(map(late, forward.steps))))


@given(lookahead=st.integers(0, 4), name=st.sampled_from(ONE_STAGE), **SIZES)
@settings(max_examples=40, deadline=None)
def test_early_receives_change_nothing_else_and_run_ahead_by_the_lookahead(
    lookahead: int, name: str, stages: int, micro_batches: int
) -> None:
    for row in lower_schedule(SCHEDULES[name](stages, micro_batches)).steps:
        early = post_early(row, lookahead)
        assert sorted(map(str, early)) == sorted(map(str, row))
        assert [s for s in early if not isinstance(s, Receive)] == [s for s in row if not isinstance(s, Receive)]
        consumers = {step.message.consumer for step in row if isinstance(step, Receive)}
        total, posted, used = len(consumers), 0, 0
        for step in early:
            posted += isinstance(step, Receive)
            if step in consumers:
                assert posted == min(total, used + 1 + lookahead)
                used += 1


def untimed_program(schedule: Schedule) -> Program:
    """Return a program even for a table that cannot end: sends follow their producers, receives are posted first."""
    rows: list[list] = [[] for _ in schedule.order]
    sends: dict[Action, Send] = {}
    for rank, row in enumerate(schedule.order):
        for entry in row:
            for action in entry.parts:
                source = schedule.input_of(action)
                if source is not None and schedule.rank_of(source) != rank:
                    message = Message(0, source, action, schedule.rank_of(source), rank, 0, 0)
                    rows[rank].append(Receive(message))
                    sends[source] = Send(message)
            rows[rank].append(entry)
    steps = []
    for row in rows:
        after = [
            [] if isinstance(step, Receive) else [sends[part] for part in step.parts if part in sends] for step in row
        ]
        steps.append(tuple(part for step, leaving in zip(row, after, strict=True) for part in (step, *leaving)))
    return Program(schedule, tuple(steps))


@given(
    name=st.sampled_from([*ALL_SCHEDULES]),
    seed=st.integers(0, 10**6),
    swaps=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 3, 4]),
    micro_batches=st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_random_swaps_are_proved_fine_or_rejected_as_running_them_shows(
    name: str, seed: int, swaps: int, ranks: int, micro_batches: int
) -> None:
    """What is proved fine trains right; what is rejected comes to no end, or to other gradients."""
    random = Random(seed)
    try:
        schedule = make_schedule(name, ranks, micro_batches)
    except ConfigError:
        return
    rows = [list(row) for row in schedule.order]
    for _ in range(swaps):
        row = random.choice(rows)
        at = random.randrange(len(row) - 1)
        to = min(len(row) - 1, at + random.randint(1, 3))
        row[at], row[to] = row[to], row[at]
    swapped = replace(schedule, order=tuple(map(tuple, rows)))
    layers, batch = make_layers(schedule.num_stages, parallel=True), make_batch(micro_batches)
    executors = executors_in_process(schedule, make_stages(layers, batch))
    for executor in executors:
        executor.weights = executors[0].weights  # a stage that two ranks hold is one module here, with one queue
    for layer in layers:
        attach_queue(layer, executors[0].weights)
    try:
        program, fine = check_schedule(swapped), True
    except ConfigError:
        program, fine = untimed_program(swapped), False
    try:
        outputs, stuck = run_in_process(executors, program, seed)
    except KeyError:  # a backward before its own forward
        assert not fine
        return
    losses, gradients = plain_losses_and_gradients(schedule.num_stages, micro_batches)
    mine = gradients_of(layers)
    right = len(mine) == len(gradients) and all(
        torch.allclose(one, other, rtol=1e-12, atol=1e-14) for one, other in zip(mine, gradients, strict=True)
    )
    assert fine == (not stuck and right)
    if fine:
        found = sorted(loss.item() for row in outputs for loss in row)
        assert found == pytest.approx(sorted(losses), rel=1e-12)


def comes_to_its_end(schedule: Schedule) -> bool:
    """Play a table without times, known to differ from a right one by the order within ranks only."""
    done: set = set()
    position = [0] * schedule.num_ranks

    def is_ready(rank: int) -> bool:
        if position[rank] == len(schedule.order[rank]):
            return False
        for action in schedule.order[rank][position[rank]].parts:
            kind, (pipe, stage, number) = action.kind, action.chunk
            last = stage == schedule.num_stages - 1
            if kind == "F" and stage > 0 and ("F", (pipe, stage - 1, number)) not in done:
                return False
            if kind in "BI" and ("F", action.chunk) not in done:
                return False
            if (
                kind in "BI"
                and not last
                and not {("B", (pipe, stage + 1, number)), ("I", (pipe, stage + 1, number))} & done
            ):
                return False
            if kind == "W" and ("I", action.chunk) not in done:
                return False
        return True

    while ready := [rank for rank in range(schedule.num_ranks) if is_ready(rank)]:
        for rank in ready:
            done |= {(action.kind, action.chunk) for action in schedule.order[rank][position[rank]].parts}
            position[rank] += 1
    return all(place == len(row) for place, row in zip(position, schedule.order, strict=True))


@given(
    name=st.sampled_from([*ALL_SCHEDULES]),
    seed=st.integers(0, 10**6),
    swaps=st.integers(1, 4),
    ranks=st.sampled_from([2, 4]),
    more=st.integers(0, 4),
)
@settings(max_examples=120, deadline=None)
def test_random_swaps_in_any_schedule_are_proved_fine_exactly_if_the_table_comes_to_its_end(
    name: str, seed: int, swaps: int, ranks: int, more: int
) -> None:
    random = Random(seed)
    schedule = make_schedule(name, ranks, 2 * ranks + 2 * more)
    rows = [list(row) for row in schedule.order]
    for _ in range(swaps):
        row = random.choice(rows)
        at = random.randrange(len(row) - 1)
        to = min(len(row) - 1, at + random.randint(1, 4))
        row[at], row[to] = row[to], row[at]
    swapped = replace(schedule, order=tuple(map(tuple, rows)))
    try:
        check_schedule(swapped)
    except ConfigError as error:
        assert len(error.problems) == 1 and not comes_to_its_end(swapped)
    else:
        assert comes_to_its_end(swapped)


def test_a_pair_of_one_chunk_is_refused_and_one_of_two_chunks_needs_both_inputs() -> None:
    pair = Pair(Action("F", 1, 0), Action("B", 1, 0))
    schedule = SCHEDULES["1f1b"](2, 1)
    with pytest.raises(
        ConfigError, match=r"rank 1, position 0, \(1F0\|1B0\): the two are of one chunk, and 1B0 needs 1F0"
    ):
        check_schedule(replace(schedule, order=(schedule.order[0], (pair,))))
    rows = ["0F0,0F1,0B0,0B1", "1F0,(1F1|1B0),1B1"]
    program = check_schedule(parse_csv("\n".join(rows), "paired"))
    # Both results leave when the pair is over: the gradient of 0 cannot come before the forward of 1 is there.
    assert [str(step) for step in program.steps[1]] == [
        "receive(0F0 from rank 0)",
        "1F0",
        "receive(0F1 from rank 0)",
        "(1F1|1B0)",
        "send(1B0 to rank 0)",
        "1B1",
        "send(1B1 to rank 0)",
    ]
    with pytest.raises(
        ConfigError, match=r"0B0 waits for 1B0; rank 1, position 1 \(line 2, column 2\): \(1F1\|1B0\) waits"
    ):
        check_schedule(parse_csv("\n".join(["0F0,0B0,0F1,0B1", rows[1]]), "paired"))


@given(lookahead=st.integers(0, 3), name=st.sampled_from(["zb-v", "dualpipe", "dualpipev", "interleaved"]))
@settings(max_examples=20, deadline=None)
def test_early_receives_are_posted_for_both_of_a_pair(lookahead: int, name: str) -> None:
    for row in lower_schedule(make_schedule(name, 4, 10)).steps:
        early = post_early(row, lookahead)
        assert sorted(map(str, early)) == sorted(map(str, row))
        fed = {step.message.consumer for step in row if isinstance(step, Receive)}
        posted: set = set()
        for step in early:
            if isinstance(step, Receive):
                posted.add(step.message.consumer)
            elif not isinstance(step, Send):
                assert fed & set(step.parts) <= posted

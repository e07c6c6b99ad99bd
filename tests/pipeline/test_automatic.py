"""The choice of a schedule: the simulator's best, within memory, with a reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.pipeline import ALL_SCHEDULES, Costs, Memory, make_schedule, simulate
from parallax.pipeline.schedules.automatic import choose_schedule, compare_schedules
from parallax.training.options import ParallelOptions


def chosen(*arguments, **options) -> str:
    return str(choose_schedule(*arguments, **options).chosen)


@pytest.mark.parametrize(
    ("costs", "makespans"),
    [
        (Costs(), {"1f1b": 117, "zb-h1": 103, "zb-v": 99.5, "dualpipe": 102, "dualpipev": 103}),
        (Costs(pair=2.5), {"1f1b": 117, "zb-h1": 103, "zb-v": 99.5, "dualpipe": 89, "dualpipev": 89.5}),
        (Costs(pair=2.0), {"1f1b": 117, "zb-h1": 103, "zb-v": 99.5, "dualpipe": 76, "dualpipev": 76}),
    ],
)
def test_the_same_model_on_the_same_ranks_takes_what_others_simulated(costs: Costs, makespans: dict) -> None:
    found, left_out = compare_schedules(8, 32, costs)
    assert not left_out and {each.name for each in found} == set(ALL_SCHEDULES)
    times = {each.name: each.played.makespan for each in found if each.num_chunks is None}
    assert {name: times[name] for name in makespans} == makespans
    interleaved = {each.num_chunks: each.played.makespan for each in found if each.name == "interleaved"}
    assert interleaved == {2: 106.5, 4: 101.25}
    assert [each.played.makespan for each in found] == sorted(each.played.makespan for each in found)


def test_what_is_chosen_follows_the_costs_as_the_theory_says() -> None:
    assert chosen(8, 32, Costs()) == "zb-v"  # nothing gained by pairs: no bubble inside
    assert chosen(8, 32, Costs(pair=2.5)) == "interleaved-paired with 4 stages a rank"
    assert (
        chosen(8, 32, Costs(pair=2.5), most_stages=16) == "dualpipev"
    )  # dualpipe is a little faster, at twice the weights
    names = ["gpipe", "1f1b", "1f1b-eager"]
    assert chosen(8, 64, Costs(), names=names) == "1f1b"
    assert chosen(8, 64, Costs(latency=0.5), names=names) == "1f1b-eager"
    assert chosen(8, 64, Costs(latency=3), names=names) == "gpipe"
    assert chosen(1, 4, Costs()) == "1f1b"


def test_memory_bounds_the_choice_and_the_sentence_says_so() -> None:
    memory = Memory(activations=1, stage=4)  # of a rank's share: 4 and up to p micro-batches
    free = choose_schedule(8, 32, Costs(pair=2.5), memory)
    tight = choose_schedule(8, 32, Costs(pair=2.5), memory, memory_limit=12.5)
    assert str(free.chosen) == "interleaved-paired with 4 stages a rank" and max(free.chosen.played.peak_bytes) == 14
    assert tight.name == "dualpipev" and max(tight.chosen.played.peak_bytes) == 12.5
    assert tight.why.startswith("dualpipev: a step takes 89.5, 5.9% of it bubble; the fastest of the 4 of 12 that fit")
    assert "1f1b +30.7%" in tight.why and "dualpipe holds 17 bytes on a rank" in tight.left_out
    twice = choose_schedule(4, 8, Costs(pair=2.0), names=["1f1b", "dualpipe"])
    assert twice.name == "dualpipe" and twice.why.endswith("; it holds each stage twice")
    with pytest.raises(
        ConfigError, match="holds at most 11 bytes on each rank; the least is 12, of zb-v; use more ranks"
    ):
        choose_schedule(8, 32, Costs(), memory, memory_limit=11)


def test_what_does_not_fit_the_sizes_is_left_out_with_the_reason() -> None:
    choice = choose_schedule(3, 5, Costs(), most_stages=4)
    assert choice.name == "zb-h1" and len(choice.left_out) == 7
    assert any("dualpipe needs an even number of ranks" in reason for reason in choice.left_out)
    assert any("zb-v needs 6 stages, and there are 4 layers" in reason for reason in choice.left_out)
    with pytest.raises(ConfigError, match="dualpipe needs an even number"):
        choose_schedule(3, 5, Costs(), names=["dualpipe"])
    unequal = choose_schedule(2, 8, Costs(forward=(1.0, 2.0)))
    assert any("F is given for 2 stages and there are 4" in reason for reason in unequal.left_out)


def test_costs_of_each_stage_can_be_given_for_any_number_of_stages() -> None:
    def costs(stages: int) -> Costs:
        """A head on the last stage, in a model of 16 layers."""
        return Costs(
            tuple(16 / stages + 2 * (stage == stages - 1) for stage in range(stages)), 16 / stages, 16 / stages
        )

    choice = choose_schedule(4, 16, costs, lambda stages: Memory(16 / stages), most_stages=16)
    again = make_schedule(choice.name, 4, 16, choice.num_chunks)
    assert choice.schedule == again
    assert choice.chosen.played.makespan == simulate(again, costs(again.num_stages)).makespan


@given(
    ranks=st.integers(1, 6),
    micro_batches=st.integers(1, 16),
    quarters=st.tuples(*[st.integers(1, 8)] * 3),
    latency=st.integers(0, 4),
)
@settings(max_examples=25, deadline=None)
def test_no_schedule_is_more_than_a_hundredth_faster_than_the_one_chosen(
    ranks: int, micro_batches: int, quarters: tuple[int, int, int], latency: int
) -> None:
    costs = Costs(*(quarter / 4 for quarter in quarters), latency=latency / 4)
    choice = choose_schedule(ranks, micro_batches, costs)
    for name, record in ALL_SCHEDULES.items():
        for chunks in (2, 4) if record.takes_chunks else (None,):
            try:
                schedule = make_schedule(name, ranks, micro_batches, chunks)
            except ConfigError:
                continue
            other = simulate(schedule, costs.split(schedule.num_stages / ranks)).makespan
            assert choice.chosen.played.makespan <= 1.01 * other
    assert choice.why.startswith(f"{choice.chosen}: a step takes ")


def test_a_layout_that_is_given_leaves_the_schedules_that_it_fits() -> None:
    def choose(layout: str, pp: int = 4) -> str:
        return ParallelOptions(pp=pp, schedule="auto", pipeline_layout=layout).choose_schedule(8, num_layers=8).name

    assert choose("Et*2|t*2|t*2|t*2L") == "zb-v"  # each part cut into two stages
    assert choose("Et|t*3|t*3|tL") == "zb-h1"
    assert choose("E|t*4|t*4|L") == "zb-h1"  # more stages than have layers
    assert choose("E|t|t|t|t|t*2|t*2|L", pp=2) == "interleaved"
    with pytest.raises(ConfigError) as caught:
        choose("Et*4|t*4L")
    assert caught.value.problems == [
        "--pipeline-layout 'Et*4|t*4L': it describes 2 stages and 4 are asked for (--pp); put 3 '|' in it"
    ]

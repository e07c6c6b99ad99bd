"""Layers to stages: balanced exactly, and as a layout string says; each layer exactly once."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import ConfigError
from parallax.pipeline.split import balance, parse_layout


def sizes(ranges: list[range]) -> list[int]:
    """Return the number of layers of each stage, having checked that together they are all layers in order."""
    assert [layer for stage in ranges for layer in stage] == list(range(ranges[-1].stop))
    return [len(stage) for stage in ranges]


@pytest.mark.parametrize(
    ("layers", "stages"), [(30, 4), (80, 16), (80, 32), (10, 4), (61, 16), (126, 16), (5, 5), (7, 1)]
)
def test_each_layer_is_in_exactly_one_stage_and_stages_differ_by_at_most_one(layers: int, stages: int) -> None:
    split = sizes(balance([1.0] * layers, 0.0, 0.0, stages))
    assert sum(split) == layers and len(split) == stages and max(split) - min(split) <= 1
    assert split == sorted(split)


def test_embedding_and_loss_take_layers_off_the_first_and_the_last_stage() -> None:
    assert sizes(balance([1.0] * 12, 1.0, 3.0, 4)) == [3, 4, 4, 1]
    assert sizes(balance([1.0] * 4, 10.0, 10.0, 4)) == [1, 1, 1, 1]
    assert sizes(balance([4.0, 1.0, 1.0, 1.0, 1.0], 0.0, 0.0, 2)) == [1, 4]


@given(
    costs=st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.3, 5.0]), min_size=1, max_size=8),
    extras=st.tuples(st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.0, 0.9, 4.0])),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_no_other_split_has_a_cheaper_most_costly_stage(costs: list[float], extras: tuple[float, float], data) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def worst(bounds: tuple[int, ...]) -> float:
        parts = [sum(costs[first:end]) for first, end in pairwise(bounds)]
        parts[0] += extras[0]
        parts[-1] += extras[1]
        return max(parts)

    every = [worst((0, *cuts, len(costs))) for cuts in combinations(range(1, len(costs)), stages - 1)]
    split = balance(costs, *extras, stages)
    assert min(sizes(split)) >= 1
    assert worst((0, *(stage.stop for stage in split))) == pytest.approx(min(every))


def test_fewer_layers_than_stages_says_how_many_stages_are_possible() -> None:
    with pytest.raises(ConfigError, match=r"6 layers \(--layers\) cannot be split over 8 .* use 1 to 6 stages"):
        balance([1.0] * 6, 0.0, 0.0, 8)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("Et*3|t*3|t*3|t*3L", [3, 3, 3, 3]),
        ("Ettt|(tt|)*29,L", [3, *[2] * 29, 0]),
        ("E|t*2|tL", [0, 2, 1]),
        ("EtL", [1]),
        ("E(t|t)*2L", [1, 2, 1]),
        ("E (t*2|)*3 L", [2, 2, 2, 0]),
        ("E((t)*2|)*2tL", [2, 2, 1]),
        ("Et|*1tL", [1, 1]),
        ("Et*0t|L", [1, 0]),
    ],
)
def test_megatron_layouts_are_read_as_megatron_reads_them(text: str, split: list[int]) -> None:
    assert sizes(parse_layout(text, sum(split), len(split))) == split


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Et|tL", "describes 2 stages and 3 are asked for"),
        ("Et|t|L", "places 2 decoder layers (t) and the model has 3"),
        ("Et*2|t|tL", "places 4 decoder layers (t) and the model has 3"),
        ("t|Et|tL", "must begin with E"),
        ("Et|Et|tL", "must begin with E"),
        ("Et|t|t", "must end with L"),
        ("EtL|t|tL", "must end with L"),
        ("Ettt||L", "stage 1 is empty"),
        ("Et|t|mtL", "is not supported"),
        ("Et|x|tL", "'x' is not known"),
        ("Et|(t|tL", "a '(' has no ')'"),
        ("Et|t)|tL", "a ')' has no '('"),
        ("*3Et|t|tL", "must follow a letter"),
        ("Et*2*2|t|tL", "must follow a letter"),
        ("Et*|t|tL", "'*' is not known"),
        ("Et*99999999999|t|tL", "is too much"),
        ("E((((t*99999)*99999)*9)*9)|t|tL", "is too much"),
        ("", "describes 1 stages"),
    ],
)
def test_a_wrong_layout_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, 3, 3)
    assert len(caught.value.problems) == 1 and words in caught.value.problems[0], caught.value


def test_an_empty_layout_for_one_stage_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="must begin with E"):
        parse_layout("", 1, 1)

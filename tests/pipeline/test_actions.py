"""Actions and tables as text and as data."""

import subprocess
import sys

import pytest

from parallax.errors import ConfigError
from parallax.pipeline import SCHEDULES, Action, Pair, forward_only
from parallax.pipeline.actions import parse_entry


@pytest.mark.parametrize(
    "action", [Action("F", 0, 0), Action("B", 12, 345), Action("I", 1, 2, 1), Action("W", 3, 4, 25)]
)
def test_an_action_prints_short_and_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert len(str(action)) < 8


def test_a_pair_prints_short_and_parses_back_also_from_torchs_form() -> None:
    pair = Pair(Action("F", 0, 4), Action("B", 3, 1, 1))
    assert str(pair) == "(0F4|b3B1)" and parse_entry(str(pair)) == pair
    assert parse_entry("(0F4;3B1)OVERLAP_F_B") == Pair(Action("F", 0, 4), Action("B", 3, 1))
    assert parse_entry("1F3") == Action("F", 1, 3)


@pytest.mark.parametrize("text", ["(0F4|3F1)", "(3B1|0F4)", "(0F4|3I1)"])
def test_a_pair_is_one_forward_and_one_whole_backward(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a pair; it takes one forward and one whole backward"):
        parse_entry(text)


@pytest.mark.parametrize("text", ["", "F1", "1X3", "1F", "a1F3", "1F3 2B0"])
def test_text_that_is_no_action_is_said_so(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an action"):
        Action.parse(text)


def test_one_f_one_b_of_four_stages_is_the_published_table() -> None:
    rows = str(SCHEDULES["1f1b"](4, 5)).splitlines()[1:]
    assert rows == [
        "rank 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "rank 2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
        "rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b-eager"])
def test_one_stage_is_gradient_accumulation(name: str) -> None:
    assert list(map(str, SCHEDULES[name](1, 3).order[0])) == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


@pytest.mark.parametrize("make", [*SCHEDULES.values(), forward_only])
def test_no_stages_or_no_micro_batches_is_an_error(make) -> None:
    for sizes in [(0, 1), (1, 0)]:
        with pytest.raises(ConfigError, match="at least 1"):
            make(*sizes)


def test_the_last_backward_of_each_stage_is_found_where_gradients_are_complete() -> None:
    schedule = SCHEDULES["1f1b"](2, 3)
    assert schedule.last_backwards(0) == {Action("B", 0, 2): 0}


def test_the_pure_half_does_not_import_torch() -> None:
    code = (
        "import sys, parallax.pipeline as p; p.simulate(p.SCHEDULES['1f1b'](2, 2)); p.check_schedule; "
        "import parallax.pipeline.split, parallax.pipeline.tables; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""The benchmarks compare what they say: every contestant trains the same model. Their figures are not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import layouts
from benchmarks.contest import CHECKED_STEPS, COMPARISONS, Result, compete
from benchmarks.task import Task
from parallax.mesh import Layout, Mesh
from parallax.models.config import DecoderConfig
from tests.distributed.harness import run_layout

ROOT = Path(__file__).parents[1]

TINY = Task(
    DecoderConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    ).resolved(),
    seq_len=16,
    global_batch=8,
)


def losses_of(mesh: Mesh, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the losses of the checked steps."""
    result = compete(mesh, TINY, names, rounds=0)
    assert result.disagreement() < 1e-5, result.losses
    return result.losses


def check(layout: Layout, names: tuple[str, ...]) -> None:
    first, *others = run_layout(layout, losses_of, names, timeout=120)
    assert all(other == first for other in others), "the ranks saw different losses"
    assert set(first) == set(names)
    for losses in first.values():
        assert len(set(losses)) == CHECKED_STEPS, losses


def test_the_plain_loop_trains_the_same_model() -> None:
    check(Layout(), COMPARISONS["one"].possible().contestants)


def test_dtensors_tensor_parallelism_trains_the_same_model() -> None:
    check(Layout(tp=2), COMPARISONS["tp2"].possible().contestants)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2", "dp4", "pp2", "tp2pp2"])
def test_the_other_peers_train_the_same_model(name: str) -> None:
    check(COMPARISONS[name].layout, COMPARISONS[name].possible().contestants)


def test_a_peer_whose_package_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    comparison = COMPARISONS["tp2"]
    assert comparison.missing() == ["megatron-core"]
    assert comparison.possible().peers == ("DTensor",) and comparison.possible().ours == comparison.ours


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_table_does_without_a_peer_that_did_not_run(name: str) -> None:
    comparison = COMPARISONS[name]
    ran = [contestant for contestant in comparison.contestants if contestant != "megatron-core"]
    result = Result(
        {each: [1.0] for each in ran}, {each: [1.0 if each in comparison.ours else 2.0] for each in ran}, 1e9
    )
    rows = layouts.figures({name: result}, TINY)[name]["tokens_per_second"]
    assert rows.keys() == set(ran)
    assert all(rows[ours]["ratio_best"] == rows[ours]["ratio_median"] == 2.0 for ours in comparison.ours)
    assert "| 2.00 | 2.00 |" in layouts.table({name: result}, TINY, {})


def test_a_stage_of_zero_is_compared_with_peers_that_divide_as_much() -> None:
    comparison = COMPARISONS["dp4"]
    assert comparison.rivals_of("parallax, zero 3") == ("FSDP2, zero 3",)
    assert {rival for name in comparison.ours for rival in comparison.rivals_of(name)} == set(comparison.peers)
    assert COMPARISONS["tp2"].rivals_of("parallax") == COMPARISONS["tp2"].peers


def test_contestants_that_train_different_models_are_refused() -> None:
    assert Result({"ours": [1.0, 0.9], "theirs": [1.0, 0.9]}, {}).disagreement() == 0.0
    assert Result({"ours": [2.0, 1.0], "theirs": [2.0, 1.1]}, {}).disagreement() == pytest.approx(0.1)


def test_ratios_are_of_tokens_per_second_over_those_of_the_fastest_peer() -> None:
    result = Result({}, {"ours": [2.0, 1.0, 4.0], "slow": [8.0, 8.0, 8.0], "fast": [3.0, 2.0, 4.0]})
    assert result.ratio_of_bests("ours", ("slow", "fast")) == 2.0
    assert result.median_ratio("ours", ("slow", "fast")) == 1.5


def test_an_unknown_layout_is_refused_at_once() -> None:
    command = [sys.executable, "benchmarks/layouts.py", "--only", "dp2,ep2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "--only ep2 is unknown; use one, dp2, dp4, tp2, pp2, tp2pp2" in run.stderr

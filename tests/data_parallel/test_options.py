"""The optimizer's options say what is wrong with them."""

from __future__ import annotations

import dataclasses

import pytest

from parallax.data_parallel.options import OptimizerOptions


def test_defaults_are_legal() -> None:
    assert OptimizerOptions().check() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("zero", 4),
        ("weight_decay", -0.1),
        ("clip_grad", -1.0),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("eps", float("nan")),
        ("weight_decay", float("inf")),
    ],
)
def test_an_illegal_value_is_one_sentence_with_its_flag(field: str, value: float) -> None:
    (problem,) = dataclasses.replace(OptimizerOptions(), **{field: value}).check()
    assert problem.startswith(f"--{field.replace('_', '-')} {value} ")


def test_all_problems_are_told_at_once() -> None:
    assert len(OptimizerOptions(zero=7, weight_decay=-1, clip_grad=-1, beta1=2, beta2=2, eps=-1).check()) == 6

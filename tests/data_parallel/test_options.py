"""The optimizer's options say what is wrong with them."""

from __future__ import annotations

import dataclasses

import pytest

from parallax.data_parallel.options import OptimizerOptions


def test_defaults_are_legal() -> None:
    assert OptimizerOptions().check(dp=4) == []


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
        ("eps", 1e-38),  # denormal in fp32
        ("eps", 1e-46),  # 0 there
        ("weight_decay", float("inf")),
    ],
)
def test_an_illegal_value_is_one_sentence_with_its_flag(field: str, value: float) -> None:
    (problem,) = dataclasses.replace(OptimizerOptions(), **{field: value}).check(dp=4)
    assert problem.startswith(f"--{field.replace('_', '-')} {value} ")


def test_all_problems_are_told_at_once() -> None:
    assert len(OptimizerOptions(zero=7, weight_decay=-1, clip_grad=-1, beta1=2, beta2=2, eps=-1).check(dp=1)) == 6


@pytest.mark.parametrize(
    ("options", "dp", "words"),
    [
        (
            OptimizerOptions(zero_group=3),
            8,
            "--zero-group 3 must be at least 2 and divide dp, which is 8; use 2, 4 or 8",
        ),
        (
            OptimizerOptions(zero_group=1),
            1,
            "--zero-group 1 must be at least 2 and divide dp, which is 1; leave it out",
        ),
        (OptimizerOptions(zero=0, zero_group=2), 4, "--zero-group 2 has no effect with --zero 0"),
        (OptimizerOptions(momentum=0.5), 1, "--momentum 0.5 has no effect with --optimizer adamw"),
        (OptimizerOptions("sgd", beta1=0.5), 1, "--beta1 0.5 has no effect with --optimizer sgd"),
        (OptimizerOptions("sgd", beta2=0.9), 1, "--beta2 0.9 has no effect with --optimizer sgd"),
        (OptimizerOptions("sgd", eps=0.0), 1, "--eps 0.0 has no effect with --optimizer sgd"),
        (OptimizerOptions("sgd", momentum=1.0), 1, "--momentum 1.0 must be"),
        (OptimizerOptions(moment_dtype="bf16", beta2=0.999), 1, "--moment-dtype bf16 is too coarse for --beta2 0.999"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: OptimizerOptions, dp: int, words: str) -> None:
    (problem,) = options.check(dp)
    assert problem.startswith(words)


def test_muon_has_the_options_of_adamw_for_what_it_leaves_to_it() -> None:
    assert OptimizerOptions("muon", beta1=0.5, beta2=0.5, eps=1.1754944e-38).check(dp=1) == []

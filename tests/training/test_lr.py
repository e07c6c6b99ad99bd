"""The learning rate against closed forms, torch's schedulers and transformers'."""

from __future__ import annotations

import math

import pytest

from parallax.training.lr import LearningRateOptions, learning_rate


def rates(steps: int, **options: object) -> list[float]:
    resolved = LearningRateOptions(**options).resolved(steps, 256)
    assert resolved.check(steps, 256) == []
    return [learning_rate(step, resolved) for step in range(steps)]


def torch_rates(steps: int, warmup: int, after: str, lr: float, min_lr: float) -> list[float]:
    import torch
    from torch.optim import lr_scheduler as scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    rise = scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
    if after == "cosine":
        fall = scheduler.CosineAnnealingLR(optimizer, steps - warmup, min_lr)
    else:
        fall = scheduler.LinearLR(optimizer, 1.0, min_lr / lr, total_iters=steps - warmup)
    both = scheduler.SequentialLR(optimizer, [rise, fall], [warmup])
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    return result


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [1, 7])
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_warm_up_and_decay_equal_those_of_torch(shape: str, warmup: int) -> None:
    ours = rates(50, lr=3e-3, min_lr=2e-4, warmup_steps=warmup, lr_schedule=shape)
    assert ours == pytest.approx(torch_rates(50, warmup, shape, 3e-3, 2e-4), rel=1e-9)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_the_decay_equals_that_of_transformers(shape: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    make = getattr(transformers, f"get_{shape}_schedule_with_warmup")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, num_warmup_steps=5, num_training_steps=40)
    theirs = []
    for _ in range(40):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = rates(40, lr=1.0, min_lr=0.0, warmup_steps=5, lr_schedule=shape)
    assert ours[5:] == pytest.approx(theirs[5:], rel=1e-9)  # their warm-up begins with a rate of 0, ours does not


def test_the_cosine_is_half_way_at_the_middle_of_the_decay() -> None:
    ours = rates(110, lr=1.0, min_lr=0.2, warmup_steps=10)
    assert ours[10] == 1.0
    assert ours[60] == pytest.approx(0.6)
    assert ours[35] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))


def test_warm_up_stable_decay_falls_over_the_last_fifth() -> None:
    ours = rates(100, lr=1.0, min_lr=0.0, warmup_steps=10, lr_schedule="wsd")
    assert ours[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert ours[10:81] == [1.0] * 71
    assert ours[80:] == pytest.approx([1 - step / 20 for step in range(20)])


def test_a_constant_rate_stays() -> None:
    assert rates(20, lr=0.5, warmup_steps=0, lr_schedule="constant") == [0.5] * 20


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 100])
def test_no_step_of_a_run_has_a_rate_of_zero(shape: str, steps: int) -> None:
    for warmup in (None, 0, 1, steps):
        options: dict[str, object] = {"warmup_steps": warmup, "lr_schedule": shape}
        if shape != "constant":
            options["min_lr"] = 0.0
        assert min(rates(steps, lr=1e-3, **options)) > 0


def test_after_the_decay_the_rate_is_the_smallest() -> None:
    for shape in ("cosine", "linear", "wsd"):
        ours = rates(30, lr=1.0, min_lr=0.1, warmup_steps=2, lr_decay_steps=20, lr_schedule=shape)
        assert ours[20:] == [0.1] * 10
        assert ours[19] > 0.1


def test_defaults_follow_the_length_of_the_run() -> None:
    assert LearningRateOptions(lr=1.0).resolved(100, 256) == LearningRateOptions(1.0, "cosine", 0.1, 10, 100)
    assert LearningRateOptions(lr=1.0).resolved(10**6, 256).warmup_steps == 2000
    assert LearningRateOptions(lr=1.0, lr_schedule="constant").resolved(50, 256).min_lr is None


def test_a_longer_run_with_the_same_decay_starts_with_the_same_rates() -> None:
    shorter = rates(4, lr=1.0, warmup_steps=1, lr_decay_steps=8)
    assert rates(8, lr=1.0, warmup_steps=1, lr_decay_steps=8)[:4] == shorter


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, "--lr 0.0 must be above 0"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "--min-lr 0.01 must be between 0 and --lr 0.001"),
        ({"warmup_steps": 101}, "--warmup-steps 101 must be between 0 and the 100 steps"),
        ({"warmup_steps": 20, "lr_decay_steps": 10}, "--lr-decay-steps 10 must be at least --warmup-steps 20"),
        (
            {"lr_schedule": "constant", "lr_decay_steps": 50},
            "--lr-decay-steps has no effect with --lr-schedule constant",
        ),
        ({"lr_schedule": "constant", "min_lr": 0.0}, "--min-lr has no effect with --lr-schedule constant"),
    ],
)
def test_contradictions_are_named(options: dict[str, object], words: str) -> None:
    (problem,) = LearningRateOptions(**options).check(100, 256)
    assert problem.startswith(words)

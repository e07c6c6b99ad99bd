"""What one optimizer and layout saved goes on in any other: the losses are those of a run that was never broken."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from parallax.checkpoint.load import load
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.save import save
from parallax.mesh import Layout, Mesh
from tests.distributed.harness import run_layout
from tests.distributed.training import Case, build, loader_of

STEPS = 2
CASES = [Case(optimizer="muon"), Case(optimizer="sgd"), Case(optimizer="adamw", narrow=("moment_dtype",))]


def _train(mesh: Mesh, case: Case, steps: range, path: Path | None, root: Path | None) -> list[tuple[float, float]]:
    """Do some steps, from a checkpoint if there is one, and save."""
    step, loader = build(mesh, case), loader_of(mesh, case)
    parts = CheckpointParts(case.model, step.parameters, step.optimizer)
    if path is not None:
        load(path, parts, mesh)
    results = [step(loader.micro_batches(i), 1e-2) for i in steps]
    if root is not None:
        save(root, steps.stop, parts, mesh)
    return [(result.loss.item(), result.grad_norm.item()) for result in results]


def _cases(mesh: Mesh, cases: list[Case], steps: range, paths: list[Path | None], roots: list[Path | None]) -> list:
    return [_train(mesh, case, steps, path, root) for case, path, root in zip(cases, paths, roots, strict=True)]


NOTHING: list[Path | None] = [None] * len(CASES)


@functools.cache
def _unbroken() -> list[list[tuple[float, float]]]:
    (losses,) = run_layout(Layout(), _cases, CASES, range(2 * STEPS), NOTHING, NOTHING)
    return [case[STEPS:] for case in losses]


def _with(zero: int) -> list[Case]:
    return [Case(**{**vars(case), "zero": zero}) for case in CASES]


@pytest.mark.parametrize(
    ("first", "zero", "second", "then"),
    [(Layout(tp=2), 3, Layout(dp=2), 2), (Layout(dp=2), 3, Layout(), 0), (Layout(pp=2), 1, Layout(tp=2), 3)],
    ids=["tp2 to dp2", "dp2 to one", "pp2 to tp2"],
)
def test_states_of_every_optimizer_go_on_in_another_layout(
    first: Layout, zero: int, second: Layout, then: int, tmp_path: Path
) -> None:
    roots = [tmp_path / str(number) for number in range(len(CASES))]
    run_layout(first, _cases, _with(zero), range(STEPS), NOTHING, roots)
    saved = [root / f"step-{STEPS:08}" for root in roots]
    resumed = run_layout(second, _cases, _with(then), range(STEPS, 2 * STEPS), saved, NOTHING)[0]
    for case, got, want in zip(CASES, resumed, _unbroken(), strict=True):
        # Moments in bf16 round differences of the last bit up to those of the third digit.
        rel = 2e-4 if case.narrow else 1e-5
        for mine, right in zip(got, want, strict=True):
            assert mine == pytest.approx(right, rel=rel), case

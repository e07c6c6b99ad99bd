"""Whole runs with what is on this page of options, against plain ones: the same losses and the same checkpoints, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallax.mesh import Layout, Mesh
from tests.distributed.harness import run_layout
from tests.training.runs import contents, metrics, run, saved, scale_loss_at, write_text

ALWAYS = "--save-every 2 --lr-decay-steps 4 --warmup-steps 1"
WHOLE = f"{ALWAYS} --steps 4 --eval-every 2 --eval-steps 1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path)
    return tmp_path


def _over_sockets(mesh: Mesh, commands: list[str], folder: str, bad_step: int | None = None) -> list[list[str]]:
    mesh = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
    trouble = None if bad_step is None else (lambda mesh: scale_loss_at(mesh, (bad_step,), float("nan"), 0))
    return run(mesh, commands, folder, trouble)


def test_checkpoints_evaluations_and_resuming_do_not_see_that_weights_are_under_way(folder: Path) -> None:
    overlap = "--overlap-param-gather"
    commands = [
        f"{WHOLE} --out {folder}/plain {overlap} off",
        f"{WHOLE} --out {folder}/overlap {overlap} --profile 3 --log-every 0",
        f"{ALWAYS} --steps 2 --eval-every 2 --eval-steps 1 --out {folder}/parts {overlap}",
        f"{WHOLE} --out {folder}/parts {overlap}",
    ]
    assert run_layout(Layout(dp=2), _over_sockets, commands, str(folder)) == [[[], [], [], []]] * 2
    assert (folder / "overlap" / "profile-step-3.json").exists()
    plain = [row["eval_loss"] for row in metrics(folder / "plain") if "eval_loss" in row]
    for name in ("overlap", "parts"):
        assert [row["eval_loss"] for row in metrics(folder / name) if "eval_loss" in row] == plain
        for step in saved(folder / "plain"):
            path = Path("checkpoints", step)
            assert contents(folder / name / path) == contents(folder / "plain" / path), (name, step)


def test_going_back_after_a_bad_step_waits_for_weights_under_way(folder: Path) -> None:
    words = f"{ALWAYS} --steps 4 --on-bad-step rollback --eval-every 0"
    commands = [f"{words} --out {folder}/plain --overlap-param-gather off", f"{words} --out {folder}/overlap"]
    assert run_layout(Layout(dp=2), _over_sockets, commands, str(folder), 3) == [[[], []]] * 2
    last = Path("checkpoints", saved(folder / "plain")[-1])
    assert contents(folder / "overlap" / last) == contents(folder / "plain" / last)


def test_a_step_that_is_never_done_cannot_be_profiled(folder: Path) -> None:
    with pytest.raises(
        AssertionError, match="--profile 9 is after the last step, which is 4; name one of the run's steps"
    ):
        run_layout(Layout(), run, [f"{WHOLE} --profile 9 --out {folder}/x"], str(folder))

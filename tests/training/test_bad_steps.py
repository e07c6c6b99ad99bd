"""A step whose numbers are bad changes nothing, and what follows is decided alike on all ranks."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallax.data.loader import BatchLoader
from parallax.mesh import Layout, Mesh
from parallax.training.faults import Judge, Verdict
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL, Case, build
from tests.training.runs import contents, metrics, run, saved, scale_loss_at, write_text

ALWAYS = "--eval-every 0 --lr-decay-steps 8 --warmup-steps 1"
NAN = math.nan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path)
    return tmp_path


def _skipped(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]


def _drawn(out: Path) -> list[int]:
    """Return the steps whose loss TensorBoard shows."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def _step_count(checkpoint: Path) -> int:
    return json.loads((checkpoint / "state.json").read_text())["optimizer"]["step_count"]


@pytest.mark.parametrize("factor", [NAN, math.inf, 1e6], ids=["nan", "inf", "spike"])
def test_a_skipped_step_leaves_weights_and_states_as_they_were(factor: float, folder: Path) -> None:
    command = f"{ALWAYS} --out {folder}/run --steps 4 --save-every 1 --on-bad-step skip --spike-factor 20"
    trouble = partial(scale_loss_at, steps=(2,), factor=factor, rank=1)
    assert run_layout(Layout(dp=2), run, [command], str(folder), trouble) == [[[]]] * 2
    checkpoints = [folder / "run" / "checkpoints" / name for name in saved(folder / "run")]
    second, third, fourth = (contents(path) for path in checkpoints[1:])
    assert second == third != fourth
    assert [_step_count(path) for path in checkpoints] == [1, 2, 2, 3]
    (row,) = _skipped(folder / "run")
    assert (row["step"], row["first_sample"], row["last_sample"]) == (3, 16, 23)
    assert row["ranks"] == ([] if math.isfinite(factor) else [1])
    assert row["reason"] == ("spike" if math.isfinite(factor) else "not_finite")
    assert [entry["step"] for entry in metrics(folder / "run")] == [1, 2, 4]
    assert [entry["tokens"] for entry in metrics(folder / "run")] == [128, 256, 384]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_bad_step_stops_the_run_and_says_rank_step_and_position(layout: Layout, folder: Path) -> None:
    command = f"{ALWAYS} --tp {layout.tp} --pp {layout.pp} --out {folder}/run --steps 4 --save-every 2"
    last = layout.pp - 1  # holds the loss
    trouble = partial(scale_loss_at, steps=(2,), factor=NAN, rank=last)
    results = run_layout(layout, run, [command], str(folder), trouble)
    assert results == [results[0]] * layout.world_size
    (message,) = results[0][0]
    assert message.startswith("status 4: step 3 (samples 16 to 23 of the data order) has loss nan")
    assert f"first seen on rank {last};" in message and "without saving" in message
    assert saved(folder / "run") == ["step-00000002"]


def test_bad_steps_in_a_row_stop_the_run_although_they_are_skipped(folder: Path) -> None:
    command = f"{ALWAYS} --out {folder}/run --steps 8 --on-bad-step skip --max-bad-steps 3"
    trouble = partial(scale_loss_at, steps=(1, 3, 4, 5, 6), factor=NAN, rank=0)
    (((message,),),) = run_layout(Layout(), run, [command], str(folder), trouble)
    assert "step 6 (samples 40 to 47 of the data order)" in message and "bad step 3 in a row" in message
    assert [row["step"] for row in _skipped(folder / "run")] == [2, 4, 5, 6]


def _shift_data(mesh: Mesh) -> None:
    """Read, from the third step on, what lies two steps further on."""
    plain = BatchLoader.micro_batches
    BatchLoader.micro_batches = lambda self, step: plain(self, step if step < 2 else step + 2)  # type: ignore[method-assign]


def test_a_rollback_goes_on_from_the_checkpoint_with_the_data_after_the_bad_step(folder: Path) -> None:
    always = f"{ALWAYS} --save-every 2 --on-bad-step rollback --steps 6 --spike-factor 20"
    trouble = partial(scale_loss_at, steps=(3,), factor=NAN, rank=1)
    assert run_layout(Layout(dp=2), run, [f"{always} --out {folder}/run"], str(folder), trouble) == [[[]]] * 2
    assert run_layout(Layout(dp=2), run, [f"{always} --out {folder}/other"], str(folder), _shift_data) == [[[]]] * 2
    last = "checkpoints/step-00000006"
    assert contents(folder / "run" / last) == contents(folder / "other" / last)
    assert [row["loss"] for row in metrics(folder / "run")] == [row["loss"] for row in metrics(folder / "other")]
    assert [row["step"] for row in metrics(folder / "run")] == [1, 2, 3, 4, 5, 6]
    assert _drawn(folder / "run") == [1, 2, 3, 4, 5, 6]
    counters = json.loads((folder / "run" / last / "state.json").read_text())["training"]["counters"]
    assert counters["data_shift"] == 2 and counters["skipped"] == 0


def test_what_was_passed_over_stays_so_after_a_restart(folder: Path) -> None:
    always = f"{ALWAYS} --save-every 2 --on-bad-step rollback"
    trouble = partial(scale_loss_at, steps=(3,), factor=NAN, rank=0)
    commands = [f"{always} --out {folder}/parts --steps {steps}" for steps in (4, 6)]
    commands.append(f"{always} --out {folder}/whole --steps 6")
    assert run_layout(Layout(), run, commands, str(folder), trouble) == [[[], [], []]]
    last = "checkpoints/step-00000006"
    assert contents(folder / "parts" / last) == contents(folder / "whole" / last)
    for name in ("parts", "whole"):  # step 4 as it was before the rollback to 2
        assert [(row["step"], row["last_sample"]) for row in _skipped(folder / name)] == [(4, 31)], name
        assert _drawn(folder / name) == [1, 2, 3, 4, 5, 6], name


def test_a_run_that_begins_anew_forgets_what_was_told_of_the_first_attempt(folder: Path) -> None:
    trouble = partial(scale_loss_at, steps=(1,), factor=NAN, rank=0)
    commands = [f"{ALWAYS} --on-bad-step {choice} --steps 3 --out {folder}/run" for choice in ("abort", "skip")]
    ((stopped, whole),) = run_layout(Layout(), run, commands, str(folder), trouble)
    assert len(stopped) == 1 and whole == []
    assert [row["step"] for row in _skipped(folder / "run")] == [2]
    assert [row["step"] for row in metrics(folder / "run")] == _drawn(folder / "run") == [1, 3]


def test_rollbacks_to_one_checkpoint_come_to_an_end(folder: Path) -> None:
    command = f"{ALWAYS} --save-every 2 --on-bad-step rollback --steps 6 --max-bad-steps 2 --out {folder}/run"
    trouble = partial(scale_loss_at, steps=tuple(range(3, 100, 2)), factor=NAN, rank=0)
    (((message,),),) = run_layout(Layout(), run, [command], str(folder), trouble)
    assert "status 4" in message and "after 2 rollbacks to" in message
    command = f"{ALWAYS} --save-every 2 --on-bad-step rollback --steps 6 --out {folder}/early"
    trouble = partial(scale_loss_at, steps=(0,), factor=NAN, rank=0)
    (((message,),),) = run_layout(Layout(), run, [command], str(folder), trouble)
    assert "no checkpoint to roll back to" in message


def _empty_step(mesh: Mesh, zero: int) -> list:
    """Train a step, then one without any target; return what changed in the second, and its numbers."""
    step = build(mesh, Case(zero=zero, micro_batch=1, global_batch=4))
    ids = torch.arange(16).view(1, 16) % SMALL.vocab_size
    count = 4 // mesh.layout.dp
    step([{"input_ids": ids, "labels": ids}] * count, 1e-2)
    before = {name: parameter.detach().clone() for name, parameter, _ in step.parameters}
    states = [(p.tensors["exp_avg"].clone(), p.tensors["exp_avg_sq"].clone()) for p in _pieces(step)]
    result = step([{"input_ids": ids, "labels": torch.full_like(ids, -100)}] * count, 1e-2)
    changed = [name for name, parameter, _ in step.parameters if not torch.equal(parameter, before[name])]
    after = [(p.tensors["exp_avg"], p.tensors["exp_avg_sq"]) for p in _pieces(step)]
    changed += ["exp_avg" for old, new in zip(states, after, strict=True) if not torch.equal(old[0], new[0])]
    changed += ["exp_avg_sq" for old, new in zip(states, after, strict=True) if not torch.equal(old[1], new[1])]
    return [changed, result.loss.item(), result.grad_norm.item(), result.weight.item(), int(result.verdict.item())]


def _pieces(step: object) -> list:
    return [piece for name, _, _ in step.parameters for piece in step.optimizer.pieces(name)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(pp=2)], ids=str)
def test_a_step_without_a_target_changes_nothing_not_even_by_weight_decay(layout: Layout) -> None:
    expected = [[], 0.0, 0.0, 0.0, int(Verdict.EMPTY)]
    for zero in (0, 1):
        assert run_layout(layout, _empty_step, zero) == [expected] * layout.world_size


def test_the_judge_compares_with_the_mean_of_good_steps_only() -> None:
    judge = Judge(torch.device("cpu"), spike_factor=2.0)

    def verdict(loss: float, grad_norm: float = 1.0, weight: float = 1.0) -> Verdict:
        numbers = (torch.tensor(value, dtype=torch.float64) for value in (loss, grad_norm, weight))
        return Verdict(int(judge(*numbers).item()))

    assert verdict(NAN) is Verdict.NOT_FINITE
    assert verdict(4.0) is Verdict.GOOD
    assert judge.mean_loss.item() == 4.0
    assert verdict(8.1) is Verdict.SPIKE
    assert verdict(4.0, math.inf) is Verdict.NOT_FINITE
    assert verdict(math.inf) is Verdict.NOT_FINITE
    assert verdict(0.0, 0.0, 0.0) is Verdict.EMPTY
    assert judge.mean_loss.item() == 4.0
    assert verdict(7.9) is Verdict.GOOD
    assert judge.mean_loss.item() == pytest.approx(4.0 + 3.9 / 50)

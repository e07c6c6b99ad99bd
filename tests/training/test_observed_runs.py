"""Whole runs with what is on this page of options, against plain ones: the same losses and the same checkpoints, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.data_parallel.optimizer import ShardedOptimizer
from parallax.mesh import Layout, Mesh
from parallax.pipeline.lower import Message
from parallax.pipeline.shared_transport import SharedTransport
from parallax.training.record import WAITING
from tests.distributed.harness import run_layout
from tests.training.processes import Job
from tests.training.runs import MODEL, contents, metrics, run, saved, scale_loss_at, write_text

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


def _with_a_slow_update(mesh: Mesh, commands: list[str], folder: str, shared_memory: bool) -> list[list[str]]:
    mesh = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=shared_memory)
    plain = ShardedOptimizer.step

    def step(self: ShardedOptimizer, *arguments: Any) -> None:
        time.sleep(SECONDS if mesh.rank == mesh.layout.world_size - 1 else 0.0)
        plain(self, *arguments)

    ShardedOptimizer.step = step  # type: ignore[method-assign]
    return run(mesh, commands, folder)


SECONDS = 0.4


@pytest.mark.parametrize(
    ("layout", "shared_memory", "words"),
    [
        (Layout(dp=2), False, "--overlap-param-gather on"),
        (Layout(dp=2), False, "--overlap-param-gather off"),
        (Layout(tp=2, pp=2), True, "--tp 2 --pp 2 --micro-batch 2 --profile 3"),
    ],
    ids=["overlap", "no overlap", "profiled"],
)
def test_the_shares_of_each_rank_add_up_to_the_time_of_a_step(
    layout: Layout, shared_memory: bool, words: str, folder: Path
) -> None:
    command = f"{words} --steps 5 --warmup-steps 1 --eval-every 2 --eval-steps 1 --save-every 4 --out {folder}/x"
    world_size = layout.world_size
    assert run_layout(layout, _with_a_slow_update, [command], str(folder), shared_memory) == [[[]]] * world_size
    for row in metrics(folder / "x")[1:]:
        shares = {name: share["ranks"] for name, share in row["phases"].items()}
        for rank in range(world_size):
            assert sum(of[rank] for of in shares.values()) == pytest.approx(row["step_seconds"], rel=0.05), (row, rank)
            assert shares["other"][rank] < 0.5 * SECONDS, (row, rank)
        # The others wait for the slow one, and say so.
        assert row["straggler"] == world_size - 1
        assert row["straggler_seconds"] > 0.6 * SECONDS
        for rank in range(world_size - 1):
            assert sum(shares[name][rank] for name in WAITING) > 0.6 * SECONDS


def _with_slow_messages(mesh: Mesh, commands: list[str], folder: str) -> list[list[str]]:
    """Let the last rank's results leave late, so that the first waits for them inside its pairs."""
    plain, model = SharedTransport.send, MODEL.replace("--layers 2", "--layers 4")

    def send(self: SharedTransport, message: Message, tensor: torch.Tensor) -> None:
        time.sleep(MESSAGE_SECONDS if mesh.rank == mesh.layout.world_size - 1 else 0.0)
        plain(self, message, tensor)

    SharedTransport.send = send  # type: ignore[method-assign]
    return run(mesh, commands, folder, model=model)


MESSAGE_SECONDS = 0.02


@pytest.mark.slow
def test_no_second_is_counted_twice_where_a_pair_waits_for_a_message(folder: Path) -> None:
    schedules = ("dualpipe", "dualpipev", "interleaved-paired")
    words = "--micro-batch 1 --pp 2 --steps 2 --warmup-steps 1 --log-every 1 --eval-every 0"
    commands = [f"{words} --schedule {name} --out {folder}/{name}" for name in schedules]
    assert run_layout(Layout(pp=2), _with_slow_messages, commands, str(folder)) == [[[]] * len(schedules)] * 2
    for name in schedules:
        for row in metrics(folder / name)[1:]:
            shares = {share: of["ranks"] for share, of in row["phases"].items()}
            assert min(map(min, shares.values())) >= 0, (name, shares)
            first, last = (sum(of[rank] for of in shares.values()) for rank in range(2))
            assert first == pytest.approx(row["step_seconds"], abs=1e-5)
            assert last == pytest.approx(row["step_seconds"], rel=0.1), "its own stopwatch says so"
            # What the first rank waits for, inside its pairs too, it does not work.
            waited = sum(shares[share][0] for share in WAITING)
            assert waited > 4 * MESSAGE_SECONDS and shares["other"][0] < waited, (name, shares)


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    for name in ("profile-step-2.json", "1f1b-step-2.json"):
        (tmp_path / "run" / name).mkdir(parents=True)
    words = f"{WHOLE} --profile 2 --trace-pipeline 2 --out {tmp_path}/run"
    with Job(2, words, tmp_path) as job:
        assert job.wait() == [0, 0]
        for option in ("profile", "trace-pipeline"):
            assert f"what --{option} asks for cannot be written: Is a directory" in job.output(0)


def test_a_step_that_is_never_done_cannot_be_profiled(folder: Path) -> None:
    with pytest.raises(
        AssertionError, match="--profile 9 is after the last step, which is 4; name one of the run's steps"
    ):
        run_layout(Layout(), run, [f"{WHOLE} --profile 9 --out {folder}/x"], str(folder))

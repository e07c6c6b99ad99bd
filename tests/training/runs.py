"""Whole runs of pretrain.py on a small text, in the processes of a test, and trouble that is made for them on the way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import pretrain
from parallax.config import PretrainOptions
from parallax.data.loader import BatchLoader
from parallax.data.prepare import prepare_data
from parallax.errors import ConfigError, Stop
from parallax.mesh import Mesh
from parallax.objectives.next_token import NextToken
from parallax.resolve import read_options, resolve

MODEL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 16 --global-batch 8 --tokenizer bytes"

Trouble = Callable[[Mesh], None]


def write_text(folder: Path) -> None:
    """Write the text that the runs train on."""
    lines = (f"line {i}: {i * i % 97} sheep and {i * 7 % 31} goats went over the bridge\n" for i in range(400))
    (folder / "text.txt").write_text("".join(lines))


def run(
    mesh: Mesh, commands: list[str], folder: str, trouble: Trouble | None = None, model: str = MODEL
) -> list[list[str]]:
    """Run pretrain.py's own training for each command line in one world; return the problems of each.

    trouble: called first, on each rank; it prepares what goes wrong.
    """
    if trouble is not None:
        trouble(mesh)
    problems = []
    for command in commands:
        words = f"{model} --data {folder}/text.txt {command}".split()
        options, found = read_options(words, PretrainOptions)
        assert not found, found
        config = resolve(options, mesh.layout.world_size)
        try:
            pretrain.train(config, prepare_data(config.data, config.training.seq_len), mesh)
            problems.append([])
        except ConfigError as error:
            problems.append(error.problems)
        except Stop as stop:
            problems.append([f"status {stop.status}: {stop}"])
    return problems


def metrics(out: Path) -> list[dict]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint that no layout and no path shows in."""
    names = [*checkpoint.glob("model/*"), *checkpoint.glob("optimizer/*")]
    return {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in names}


def saved(out: Path) -> list[str]:
    """Return the names in the run's folder of checkpoints."""
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def before_data(action: Callable[[BatchLoader, int], None]) -> None:
    """Have `action(loader, step)` run in this process before each step's micro-batches are read."""
    whole = BatchLoader.micro_batches

    def micro_batches(self: BatchLoader, step: int) -> list[dict[str, torch.Tensor]]:
        action(self, step)
        return whole(self, step)

    BatchLoader.micro_batches = micro_batches  # type: ignore[method-assign]


def signal_at(mesh: Mesh, number: int, step: int, rank: int, training: bool = True, wait: float = 0.0) -> None:
    """Have `rank` get a signal while it waits for the data of a step, counted from 0, of training or of an evaluation.

    wait: seconds that the data then take, on the other ranks too.
    """

    def action(loader: BatchLoader, now: int) -> None:
        if loader.order.shuffle == training and now == step:
            if mesh.rank == rank:
                os.kill(os.getpid(), number)
            time.sleep(wait)

    before_data(action)


def scale_loss_at(mesh: Mesh, steps: tuple[int, ...], factor: float, rank: int) -> None:
    """Multiply the training loss of data steps, counted from 0, on one rank."""
    current = [-1]

    def note(loader: BatchLoader, step: int) -> None:
        current[0] = step if loader.order.shuffle else -1

    before_data(note)
    plain = NextToken.loss

    def loss(self: NextToken, logits: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = plain(self, logits, batch)
        return (total * factor if current[0] in steps and mesh.rank == rank else total), weight

    NextToken.loss = loss  # type: ignore[method-assign]

"""Parallax as a contestant: the train step that pretrain.py builds, with its default options."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.task import Batch, Task
from parallax.mesh import Mesh
from parallax.objectives.next_token import NextToken
from parallax.training.build import build_train_step
from parallax.training.options import ParallelOptions, TrainingOptions
from parallax.training.stages import stage_ranges


class Parallax:
    """zero: the ZeRO stage; None for the default."""

    def __init__(self, mesh: Mesh, task: Task, zero: int | None = None) -> None:
        training = TrainingOptions(
            seq_len=task.seq_len, micro_batch=task.micro_batch, global_batch=task.global_batch, seed=task.seed
        )
        layout = mesh.layout
        self.rank, self.learning_rate = mesh.rank, task.learning_rate
        self.train_step = build_train_step(
            mesh,
            task.model,
            stage_ranges(task.model, layout, None, task.seq_len),
            ParallelOptions(tp=layout.tp, pp=layout.pp, dp=layout.dp),
            training.resolved(),
            task.optimizer if zero is None else replace(task.optimizer, zero=zero),
            NextToken(task.model.vocab_size, mesh.tp),
        )

    def step(self, batches: list[Batch]) -> torch.Tensor:
        loss = self.train_step(batches, self.learning_rate).loss
        return loss if self.rank == 0 else torch.zeros_like(loss)

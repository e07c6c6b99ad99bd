"""Parallax as a contestant: the train step that pretrain.py builds, with its default options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.task import Batch, Task
from parallax.mesh import Mesh
from parallax.objectives.next_token import NextToken
from parallax.pipeline.schedules import make_schedule
from parallax.training.build import build_train_step
from parallax.training.options import TrainingOptions
from parallax.training.stages import stage_ranges


class Parallax:
    """schedule: of the pipeline. choices: options of the optimizer that are not the defaults."""

    def __init__(self, mesh: Mesh, task: Task, *, schedule: str = "1f1b", **choices: Any) -> None:
        training = TrainingOptions(
            seq_len=task.seq_len, micro_batch=task.micro_batch, global_batch=task.global_batch, seed=task.seed
        )
        pp, micro_batches = mesh.layout.pp, task.global_batch // (task.micro_batch * mesh.layout.dp)
        self.rank, self.learning_rate = mesh.rank, task.learning_rate
        table = make_schedule(schedule, pp, micro_batches)
        self.train_step = build_train_step(
            mesh,
            task.model,
            stage_ranges(task.model, table.num_stages, None, task.seq_len, pp),
            table,
            training.resolved(),
            replace(task.optimizer, **choices),
            NextToken(task.model.vocab_size, mesh.tp),
        )

    def step(self, batches: list[Batch]) -> torch.Tensor:
        loss = self.train_step(batches, self.learning_rate).loss
        return loss if self.rank == 0 else torch.zeros_like(loss)

"""What all contestants of a comparison train: one model, one batch, one optimizer, and the same tokens and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from parallax.data.loader import BatchLoader
from parallax.data_parallel.options import OptimizerOptions
from parallax.mesh import Mesh
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage
from parallax.tensor_parallel.facts import initial_values, named_parameters_with_facts

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """Sizes of a comparison. The vocabulary is a multiple of 128, so that nobody has to pad it."""

    model: DecoderConfig = DecoderConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    ).resolved()
    seq_len: int = 256
    micro_batch: int = 2
    global_batch: int = 16
    optimizer: OptimizerOptions = OptimizerOptions()
    learning_rate: float = 1e-3
    seed: int = 5

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    def micro_batches_per_rank(self, mesh: Mesh) -> int:
        """Return how many micro-batches each data-parallel rank takes in a step."""
        return self.global_batch // (self.micro_batch * mesh.layout.dp)


class Contestant(Protocol):
    """One implementation, built and ready to train from the task's initial weights."""

    def step(self, batches: list[Batch]) -> torch.Tensor:
        """Train one step on this rank's micro-batches; return a scalar that sums over the world to the step's mean loss."""


class _MadeUpTokens:
    """Samples `[seq + 1]` of a noisy cycle: something can be learnt, and every sample differs."""

    def __init__(self, vocab_size: int, seq_len: int, count: int) -> None:
        generator = np.random.Generator(np.random.Philox(11))
        steps = generator.integers(0, 3, (count, seq_len + 1))
        self.samples = (np.cumsum(steps, 1) + generator.integers(0, vocab_size, (count, 1))) % vocab_size
        self.fingerprint = f"made up {vocab_size} {seq_len} {count}"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.samples[i]


def make_batches(task: Task, mesh: Mesh, steps: int) -> list[list[Batch]]:
    """Return this rank's micro-batches of each of the first `steps` steps; contestants only read them."""
    data = _MadeUpTokens(task.model.vocab_size, task.seq_len, steps * task.global_batch)
    loader = BatchLoader(data, task.seed, task.global_batch, task.micro_batch, mesh.dp_rank, mesh.layout.dp)
    return [list(loader.micro_batches(step)) for step in range(steps)]


def initial_weights(task: Task) -> dict[str, torch.Tensor]:
    """Return Parallax's initial values of every parameter of the whole model, by its Hugging Face name."""
    with torch.device("meta"):
        whole = DecoderStage(task.model)
    return {
        name: torch.from_numpy(initial_values(name, facts, task.seed))
        for name, _, facts in named_parameters_with_facts(whole)
    }

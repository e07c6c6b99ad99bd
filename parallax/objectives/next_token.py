"""Next-token prediction: every token whose label is not -100 counts the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from parallax.mesh import Group
from parallax.tensor_parallel.vocabulary import IGNORE_INDEX, vocab_parallel_cross_entropy


@dataclass(frozen=True)
class NextToken:
    """The cross-entropy of `labels` `[batch, seq]`, which are shifted already: `labels[:, t]` follows `input_ids[:, t]`."""

    vocab_size: int
    tp: Group | None = None

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return how many tokens of `batch` are trained on, known before any forward pass."""
        return (batch["labels"] != IGNORE_INDEX).sum()

    def loss(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (summed loss, weight) of `logits` `[batch, seq, padded_vocab/tp]`, this rank's columns."""
        losses = vocab_parallel_cross_entropy(logits, batch["labels"], vocab_size=self.vocab_size, tp=self.tp)
        return losses.sum(), self.weight(batch)

"""Next-token prediction on what is to be learned: labels that are not -100, each counting its weight.

Without `weights` in the batch every label counts 1. With them, labels count what they say: a turn's weight in the data, or, when
every sample shall count the same, one over the number of the sample's labels. The loss of a step is the weighted sum over all its
micro-batches and ranks, divided by the sum of the weights, so a token's share never depends on which others are in its micro-batch:

    micro-batches with losses (4) and (1, 1, 1)      (4 + 1 + 1 + 1) / 4 = 1.75, and not (4 + 1) / 2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from parallax.mesh import Group
from parallax.tensor_parallel.vocabulary import IGNORE_INDEX, vocab_parallel_cross_entropy


@dataclass(frozen=True)
class MaskedNextToken:
    """The cross-entropy of `labels` `[batch, seq]`, which are shifted already, each times its `weights` `[batch, seq]`."""

    vocab_size: int
    tp: Group | None = None

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed weight of the labels in `batch`, known before any forward pass; 0 where nothing is learned."""
        learned = batch["labels"] != IGNORE_INDEX
        if "weights" not in batch:
            return learned.sum()
        return (batch["weights"] * learned).sum(dtype=torch.float64)

    def loss(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (summed loss, weight) of `logits` `[batch, seq, padded_vocab/tp]`, this rank's columns."""
        losses = vocab_parallel_cross_entropy(logits, batch["labels"], vocab_size=self.vocab_size, tp=self.tp)
        if "weights" in batch:
            losses = losses * batch["weights"]
        return losses.sum(), self.weight(batch)

"""One pipeline stage of the decoder; the whole model is the single stage of a pipeline of length one.

A stage holds the embedding if it is the first, a contiguous range of layers, and the final norm and the head if it is
the last. Modules keep their global names (`model.layers.17.mlp.up_proj`), so that a parameter has one name in every
layout. The tied head of a last stage that is not the first is a second copy of `model.embed_tokens` under its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from parallax.collectives import copy_to, gather_sequence
from parallax.mesh import Group, Replicas, rank_of, size_of
from parallax.models.attention import Rows
from parallax.models.blocks import TransformerLayer, make_norm
from parallax.models.config import DecoderConfig
from parallax.models.rotary import RotaryEmbedding
from parallax.tensor_parallel.chunked_logits import ChunkedLogits
from parallax.tensor_parallel.facts import ParameterFacts, replicated, update_facts
from parallax.tensor_parallel.gathered_input import GatheredInput, gathered_input
from parallax.tensor_parallel.linear import ColumnParallelLinear, column_parallel
from parallax.tensor_parallel.scopes import ParameterScope
from parallax.tensor_parallel.segments import Segment, into_columns
from parallax.tensor_parallel.vocabulary import VocabParallelEmbedding, padded_vocab_size


@dataclass(frozen=True)
class StageSpec:
    """Which part of the model a stage is: `layers` (global indices) of stage `index` out of `count`."""

    layers: range
    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class PositionEmbedding(nn.Module):
    """Learned positions: add row p to the token at position p of `[batch, seq(/tp), hidden]`."""

    def __init__(self, length: int, hidden_size: int, *, tp: Group | None, sequence_parallel: bool, std: float) -> None:
        super().__init__()
        self.tp = tp if sequence_parallel else None
        self.weight = nn.Parameter(torch.empty(length, hidden_size))
        self.parameter_facts: dict[str, ParameterFacts] = {
            "weight": replace(replicated((length, hidden_size), tp, partial=sequence_parallel, std=std), is_table=True)
        }

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """positions: int64 `[batch, seq]`, of the whole sequence also where hidden is this rank's part; None: 0 .. seq - 1."""
        first = rank_of(self.tp) * hidden.shape[1]
        here = slice(first, first + hidden.shape[1])
        return hidden + (self.weight[here] if positions is None else F.embedding(positions[:, here], self.weight))


class DecoderBody(nn.Module):
    """What Hugging Face calls `model`: everything but the head. Parts that a stage does not hold are absent."""

    embed_tokens: VocabParallelEmbedding
    embed_positions: PositionEmbedding
    layers: nn.ModuleDict
    norm: nn.Module


class DecoderStage(nn.Module):
    """Token ids `[batch, seq]` (first stage) or hidden `[batch, seq(/tp), hidden]` to hidden, or to logits (last stage).

    Logits are `[batch, seq, padded_vocab/tp]`, this rank's columns. With a `loss_chunk`, those of more tokens than that are
    `ChunkedLogits`, which a loss takes as well.
    """

    loss_chunk = 0
    is_compiled = False  # see parallax.models.compiled
    exact_sums = False  # of the head, as of the parallel layers

    def __init__(
        self,
        config: DecoderConfig,
        spec: StageSpec | None = None,
        *,
        tp: Group | None = None,
        sequence_parallel: bool = False,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        config = config.resolved()
        spec = spec or StageSpec(range(config.num_hidden_layers))
        self.config, self.spec, self.tp = config, spec, tp
        self.sequence_parallel = sequence_parallel and tp is not None
        std = config.initializer_range
        self.model = DecoderBody()
        tied_head = spec.is_last and config.tie_word_embeddings
        if spec.is_first or tied_head:
            self.model.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, tp=tp, sequence_parallel=self.sequence_parallel, std=std
            )
            if config.tie_word_embeddings and spec.count > 1:
                update_facts(self, "model.embed_tokens.weight", replicas=Replicas(stages=(0, spec.count - 1)))
        if spec.is_first and config.positions == "learned":
            self.model.embed_positions = PositionEmbedding(
                config.max_position_embeddings,
                config.hidden_size,
                tp=tp,
                sequence_parallel=self.sequence_parallel,
                std=std,
            )
        rotary = RotaryEmbedding(config) if config.positions == "rotary" else None
        self.model.layers = nn.ModuleDict(
            {
                str(index): TransformerLayer(
                    config, tp=tp, sequence_parallel=self.sequence_parallel, rotary=rotary, recompute=recompute
                )
                for index in spec.layers
            }
        )
        if spec.is_last:
            self.model.norm = make_norm(config, tp, self.sequence_parallel)
            self.lm_head = None if tied_head else self._make_head()
            if self.lm_head is not None:
                update_facts(self, "lm_head.weight", is_table=True)

        self.scopes = self._make_scopes()

    def _make_scopes(self) -> list[ParameterScope]:
        """Return the parts of the stage whose parameters are used together, in the order of forward."""
        body = self.model
        scopes: list[ParameterScope] = []
        if self.spec.is_first:
            embeddings = [body.embed_tokens] + ([body.embed_positions] if hasattr(body, "embed_positions") else [])
            self._embedding_scope = ParameterScope(
                "embedding", lambda: [module.weight for module in embeddings], used_in_backward=False
            )
            scopes.append(self._embedding_scope)
        for index, layer in body.layers.items():
            scope = cast("TransformerLayer", layer).scope
            scope.name = f"layers.{index}"
            scopes.append(scope)
        if self.spec.is_last:
            self._head_scope = ParameterScope("head", lambda: [*body.norm.parameters(), self._head_weight])
            scopes.append(self._head_scope)
        return scopes

    @property
    def _head_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def _make_head(self) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            self.config.hidden_size,
            self.config.vocab_size,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            padded_out_features=padded_vocab_size(self.config.vocab_size, size_of(self.tp)),
            std=self.config.initializer_range,
        )

    def forward(self, input: torch.Tensor, rows: Rows | None = None) -> torch.Tensor | ChunkedLogits:
        """rows: what the rows of the batch hold, whole sequences on every rank; None: one text each, from position 0."""
        hidden = self._embedded(input, rows) if self.spec.is_first else input
        for layer in self.model.layers.values():
            hidden = layer(hidden, rows)
        if not self.spec.is_last:
            return hidden
        return self._logits(self.model.norm(self._head_scope.entered(hidden)))

    def segments(self, input_ids: torch.Tensor, rows: Rows | None = None) -> list[Segment]:
        """Return the same computation cut where it communicates over tp; the first stage ignores its input for `input_ids`."""
        layers = cast("list[TransformerLayer]", self.model.layers.values())
        segments = [segment for layer in layers for segment in layer.segments(rows)]
        if self.spec.is_first:
            segments.insert(0, Segment(lambda _: (self._embedded(input_ids, rows),)))
        if self.spec.is_last:
            gathered = gathered_input(self.tp, self.sequence_parallel)
            segments.append(into_columns(self._normed, self.tp, gathered))
            # What stands for logits goes no further than to the loss, in the same segment.
            segments.append(Segment(lambda hidden: (cast("torch.Tensor", self._logits(hidden, False, gathered)),)))
        return segments

    def _embedded(self, input_ids: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        self._embedding_scope.entered(input_ids)
        hidden = self.model.embed_tokens(input_ids)
        if self.config.positions == "learned":
            hidden = self.model.embed_positions(hidden, None if rows is None else rows.positions)
        return self._embedding_scope.left(hidden)

    def _normed(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        normed = self.model.norm(self._head_scope.entered(hidden))
        return (normed.double() if self.exact_sums else normed,)

    def _logits(
        self, hidden: torch.Tensor, communicate: bool = True, gathered: GatheredInput | None = None
    ) -> torch.Tensor | ChunkedLogits:
        tp = self.tp if communicate else None
        num_tokens = hidden.shape[0] * hidden.shape[1] * (size_of(tp) if self.sequence_parallel else 1)
        if 0 < self.loss_chunk < num_tokens:
            if self.exact_sums:
                hidden = hidden.double()  # for the sum of its gradient over tp
            whole = gather_sequence(hidden, tp) if self.sequence_parallel else copy_to(hidden, tp)
            return ChunkedLogits(whole, self._head_weight, self.loss_chunk, self.exact_sums, self._head_scope.left)
        weights = [self._head_weight]
        (logits,) = column_parallel(hidden, weights, [None], tp, self.sequence_parallel, self.exact_sums, gathered)
        return self._head_scope.left(logits)

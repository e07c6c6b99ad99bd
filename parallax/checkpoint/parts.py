"""What a checkpoint is made of, as the trainer hands it over, and what it needs of an optimizer and a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from parallax.models.config import DecoderConfig
from parallax.precision.scales import Scales
from parallax.tensor_parallel.facts import ParameterFacts

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class OptimizerPiece(Protocol):
    """The part of one parameter's optimizer state that this rank keeps.

    It is the flat range [start, stop) of the rank's own tensor, tp-sharded and padded, in row-major order. tensors: by
    name ("exp_avg", "exp_avg_sq", "main_param"), each a contiguous view `[stop - start]` of the live state, which
    loading overwrites in place.
    """

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


class OptimizerState(Protocol):
    """An optimizer whose state can be saved by parameter: together, the ranks' pieces are each parameter once or more."""

    step_count: int  # of the updates done, for the bias correction

    def pieces(self, name: str) -> Sequence[OptimizerPiece]:
        """Return what this rank keeps of the parameter `name`; nothing if other ranks keep all of it."""

    def weights(self, name: str) -> Sequence[tuple[int, int, torch.Tensor]] | None:
        """Return what this rank has of the parameter itself, as flat ranges (start, stop, live values); None: all of it."""


def weights_of(
    optimizer: OptimizerState | None, name: str, parameter: torch.Tensor
) -> Sequence[tuple[int, int, torch.Tensor]]:
    """Return what this rank has of a parameter: all, or its part where the optimizer shards parameters too."""
    parts = None if optimizer is None else optimizer.weights(name)
    return [(0, parameter.numel(), parameter.detach().view(-1))] if parts is None else parts


class TokenizerFiles(Protocol):
    """A tokenizer that has the files, by name, from which transformers opens it."""

    eos_id: int | None
    bos_id: int | None

    def files(self) -> Mapping[str, bytes]: ...


@dataclass
class CheckpointParts:
    """One rank's share of a run.

    config: of the whole model. dtype: of its parameters, as config.json says it.
    parameters: (name, local tensor, facts) of this rank's stages, names as in every layout.
    state: what the trainer wants back, as JSON can carry it; that of rank 0 is kept.
    model_files: more files of the model folder, by name; config_fields: more fields of its config.json. What a run takes over
        from the model that it starts from: `initial_weights.carried_over`.
    scales: of FP8 with delayed scaling; the trainer saves them with its state.
    """

    config: DecoderConfig
    parameters: Sequence[tuple[str, torch.Tensor, ParameterFacts]]
    optimizer: OptimizerState | None = None
    tokenizer: TokenizerFiles | None = None
    state: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    config_fields: Mapping[str, Any] = field(default_factory=dict)
    scales: Scales | None = None

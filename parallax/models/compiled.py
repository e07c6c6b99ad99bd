"""torch.compile for what lies between the products of a layer: the attention's core, and the MLP's activation.

Products, norms and communication stay as they are: they add gradients to buckets in place and overlap with each other, and a
compiler that saw them would lose or reorder that. The compiled parts are functions of tensors alone, written out plainly.

Rows that hold several documents keep their own attention, since their lengths change with each micro-batch.
"""

from __future__ import annotations

import shutil
from typing import cast

import torch
import torch.nn.functional as F

from parallax.errors import ConfigError
from parallax.models.attention import causal_attention
from parallax.models.blocks import TransformerLayer
from parallax.models.decoder import DecoderStage


def _rotated_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """`[batch, seq, heads, head_dim]`, with queries and keys to be rotated by `[seq, 1, head_dim]`."""
    return causal_attention(_rotated(query, cos, sin), _rotated(key, cos, sin), value)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([second, first], -1) * sin


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _gelu(up: torch.Tensor) -> torch.Tensor:
    return F.gelu(up, approximate="tanh")


def why_not_compile(device: torch.device) -> str | None:
    """Say what torch's compiler lacks for code on this device; None if nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "triton, which torch's compiler writes a GPU's kernels in, cannot be used here"
    from torch._inductor import config

    names = config.cpp.cxx if isinstance(config.cpp.cxx, tuple | list) else [config.cpp.cxx]
    if any(name is not None and shutil.which(name) for name in names):
        return None
    return f"torch's compiler needs a C++ compiler on a CPU ({', '.join(filter(None, names))}), and none is installed"


def compile_stage(stage: DecoderStage) -> None:
    """Have the layers of a stage compiled, at their first use; raises ConfigError if that cannot be done here.

    The model's device is that of its parameters.
    """
    device = next(stage.parameters()).device
    if (lacking := why_not_compile(device)) is not None:
        raise ConfigError(f"--compile cannot be used: {lacking}")
    attention, swiglu, gelu = (
        torch.compile(function, dynamic=False) for function in (_rotated_attention, _swiglu, _gelu)
    )
    for module in stage.model.layers.values():
        layer = cast("TransformerLayer", module)
        layer.self_attn.compiled = attention
        layer.mlp.compiled = gelu if layer.mlp.gate_proj is None else swiglu
    stage.is_compiled = True

"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split form of Hugging Face's models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from parallax.models.config import DecoderConfig


class _Rotate(torch.autograd.Function):
    """Rotate pairs (x_i, x_{i + d/2}) by the angle of position and i; backward rotates the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # Of the pair, each takes of the other what it gave to it: the other way round is the other sign.
        return rotated(gradient, cos, -sin), None, None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `[..., head_dim]` rotated: each element times its cosine, and its partner times the sine with that one's sign.

    Whole heads at a time: on a CPU, halves of 16 or 32 numbers took half as long again.
    """
    return torch.mul(x, cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class RotaryEmbedding(nn.Module):
    """Rotate `[batch, seq, heads, head_dim]` by its positions, 0 .. seq - 1 unless they are given; holds no parameters.

    The angles are computed in fp32: once per (length, device, dtype), or once for the positions given last, for which all
    layers ask in turn.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._frequencies: dict[torch.device, torch.Tensor] = {}  # a copy to a GPU waits for it: one is enough
        self._last: tuple[torch.Tensor | None, torch.dtype | None, Any] = (None, None, None)

    def tables(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines of positions 0 .. length - 1 for `rotated`, `[length, 1, head_dim]`."""
        key = (length, device, dtype)
        if key not in self._tables:
            self._tables[key] = self._cos_sin(torch.arange(length, device=device), dtype)
        return self._tables[key]

    def forward(self, heads: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """positions: int64 `[batch, seq]`."""
        if positions is None:
            cos, sin = self.tables(heads.shape[1], heads.device, heads.dtype)
        else:
            if self._last[0] is not positions or self._last[1] != heads.dtype:
                self._last = (positions, heads.dtype, self._cos_sin(positions, heads.dtype))
            cos, sin = self._last[2]
        return _Rotate.apply(heads, cos, sin)

    def _cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions `[...]` to `[..., 1, head_dim]` twice; the 1 stands for the heads. Sines of first halves are negative."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = inverse_frequencies(self.config).to(device)
        angles = positions.float().unsqueeze(-1) * self._frequencies[device]
        cos, sin = angles.to(wide).cos().to(dtype), angles.to(wide).sin().to(dtype)
        return torch.cat([cos, cos], -1).unsqueeze(-2), torch.cat([-sin, sin], -1).unsqueeze(-2)


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Return the angle per position of each pair, fp32 `[head_dim/2]`, with Llama 3.1's scaling where it is asked for."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if not config.rope_scaling:
        return frequencies
    scaling = {key: float(value) for key, value in config.rope_scaling}
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    # Long waves are stretched by the factor, short ones kept, those between blended (Llama Team 2024, the 3.1 models).
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies

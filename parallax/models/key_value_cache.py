"""Keys and values of the tokens so far, so that each new token costs one token's work; `Rows` of a single text."""

from __future__ import annotations

import torch
from torch import nn

from parallax.models.attention import causal_attention

MIN_TOKENS = 64  # that there is room for


class KeyValueCache:
    """Holds the tokens of one text, for every attention that asks.

        cache = KeyValueCache()
        cache.extend(3); logits = model(ids[:, :3], cache)
        cache.extend(1); logits = model(ids[:, 3:4], cache)      # attends to all four

    For inference only: what is written is not differentiated through.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.length = device, 0
        self._positions = torch.empty(1, 0, dtype=torch.int64)
        self._mask: torch.Tensor | None = None
        self._kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def positions(self) -> torch.Tensor:
        """Of the tokens that the next forward is given, int64 `[1, count]`."""
        return self._positions

    def extend(self, count: int) -> None:
        """Say that the next forward is given `count` more tokens."""
        first, self.length = self.length, self.length + count
        self._positions = torch.arange(first, self.length, device=self.device).unsqueeze(0)
        # Token i of the new ones sees all before them and the first i + 1 of them.
        seen = torch.ones(count, self.length, dtype=torch.bool, device=self.device).tril(first)
        self._mask = seen if first else None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """Keep the new keys and values, `[1, count, heads, head_dim]`, and attend to all."""
        first = self.length - key.shape[1]
        keys, values = self._kept.get(layer) or (key[:, :0], value[:, :0])
        if keys.shape[1] < self.length:
            keys, values = _with_room(keys, first, self.length), _with_room(values, first, self.length)
            self._kept[layer] = keys, values
        keys[:, first : self.length] = key
        values[:, first : self.length] = value
        return causal_attention(query, keys[:, : self.length], values[:, : self.length], self._mask)


def _with_room(kept: torch.Tensor, count: int, needed: int) -> torch.Tensor:
    """Return a copy of the first `count` tokens with room for twice the `needed`, so that copies stay rare."""
    wider = kept.new_empty(1, max(MIN_TOKENS, 2 * needed), *kept.shape[2:])
    wider[:, :count] = kept[:, :count]
    return wider

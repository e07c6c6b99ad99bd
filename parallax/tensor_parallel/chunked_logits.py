"""Logits that are never there all at once: the head's product and the cross-entropy, some tokens at a time.

    forward     for each chunk of tokens: logits = hidden W^T | log-sum-exp, target's logit | forget the logits
    backward    for each chunk of tokens: logits again | their gradient | its products with W and with hidden

Whole logits of a sequence are its largest tensor: 8192 tokens of a vocabulary of 128k are 4 GiB in fp32, and their gradient as
much. Here a chunk's are. The price is the head's product once more, in backward; a micro-batch that is one chunk pays nothing,
since its logits are kept. Sums are those of the whole, token by token.

The gradient of the head's weight is added up in the backward itself, also where a schedule puts weights' gradients off: what
would be put off is the gradient of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from parallax.mesh import Group, rank_of
from parallax.tensor_parallel.vocabulary import IGNORE_INDEX, log_sum_and_target, logits_gradient, over_ranks


@dataclass(frozen=True, eq=False)
class ChunkedLogits:
    """What `hidden @ weight^T` would be; objectives hand it to `vocab_parallel_cross_entropy` as they would hand logits.

    hidden: `[batch, seq, hidden]`, the same on all tp ranks; its gradient here is this rank's part of a sum over tp.
    weight: `[vocab/tp, hidden]`. chunk: tokens at a time. exact_sums: make the gradient of `hidden` in float64.
    after: is applied to the losses, as what follows the logits would be.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    chunk: int
    exact_sums: bool = False
    after: Callable[[torch.Tensor], torch.Tensor] = lambda losses: losses

    @property
    def shape(self) -> torch.Size:
        """That of the logits."""
        return torch.Size((*self.hidden.shape[:-1], len(self.weight)))

    def cross_entropy(self, labels: torch.Tensor, columns: int, tp: Group | None) -> torch.Tensor:
        """Return the losses `[batch, seq]`; see `vocab_parallel_cross_entropy`. columns: of this rank without padding."""
        losses = _ChunkedCrossEntropy.apply(self.hidden, self.weight, labels, columns, tp, self.chunk, self.exact_sums)
        return self.after(losses)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        columns: int,
        tp: Group | None,
        chunk: int,
        exact_sums: bool,
    ) -> torch.Tensor:
        local = labels.reshape(-1) - rank_of(tp) * len(weight)
        found = []
        for rows, targets in zip(_rows(hidden).split(chunk), local.split(chunk), strict=True):
            logits = F.linear(rows.to(weight.dtype), weight)
            found.append(log_sum_and_target(logits, targets, columns, tp))
        log_sum, target = (torch.cat(parts) for parts in zip(*found, strict=True))
        log_sum, target = over_ranks(logits, log_sum, target, tp)
        ctx.sink = getattr(weight, "gradient_sink", None)
        ctx.save_for_backward(hidden, weight, log_sum, local)
        ctx.columns, ctx.chunk, ctx.exact_sums, ctx.ignored = columns, chunk, exact_sums, labels == IGNORE_INDEX
        return (log_sum - target).view(labels.shape).masked_fill(ctx.ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, log_sum, local = ctx.saved_tensors
        scale = grad_loss.masked_fill(ctx.ignored, 0.0).view(-1)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        grad_weight = None
        wide_weight = weight.double() if ctx.exact_sums else weight
        pieces = (tensor.split(ctx.chunk) for tensor in (_rows(hidden), log_sum, local, scale))
        for number, (rows, sums, targets, factors) in enumerate(zip(*pieces, strict=True)):
            rows = rows.to(weight.dtype)
            gradient = logits_gradient(F.linear(rows, weight), sums, targets, factors, ctx.columns)
            if grad_hidden is not None:
                start = number * ctx.chunk
                product = gradient.to(wide_weight.dtype) @ wide_weight
                _rows(grad_hidden)[start : start + len(rows)] = product
            if needs_weight and ctx.sink is not None:
                ctx.sink.accumulate(gradient, rows)
            elif needs_weight:
                product = gradient.t() @ rows
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        return grad_hidden, grad_weight, None, None, None, None, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])

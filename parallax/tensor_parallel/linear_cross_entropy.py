"""The head and its cross-entropy together, a few tokens at a time, so that the logits never exist as a whole.

    for each chunk of tokens     logits = hidden W^T  ->  log-sum-exp, target's logit  ->  loss, and the logits are gone
    backward, chunk by chunk     the logits again     ->  (softmax - one-hot) * scale   ->  parts of both gradients

For a vocabulary of 128256, 8192 tokens of logits are 2.1 GB in bf16 and as much for their gradient; a chunk of 1024 has an
eighth of that. The price is the head's forward product once more. Losses and log-sum-exps are fp32, and so is the sum over
chunks of the weight's gradient: a sum in bf16 over many chunks would lose whole parts (seen in other implementations).

Plain PyTorch on any device, vocabulary-parallel as `vocab_parallel_cross_entropy` is. Wijmans et al. 2024 (arXiv:2411.09009)
go further, in kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from parallax.collectives import all_reduce_
from parallax.mesh import Group, rank_of, size_of
from parallax.tensor_parallel.vocabulary import IGNORE_INDEX, padded_vocab_size


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        columns: int,
        chunk: int,
        tp: Group | None,
    ) -> torch.Tensor:
        first = rank_of(tp) * weight.shape[0]
        losses, log_sums = [], []
        for rows, targets in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            logits = _logits(rows, weight, columns)
            greatest = logits.amax(-1) if columns else logits.new_full(targets.shape, -torch.inf)
            shift = all_reduce_(greatest, tp, op="max")
            sums = (logits - shift.unsqueeze(-1)).exp_().sum(-1)
            local, here = _local(targets, first, columns)
            target = logits.gather(-1, local).squeeze(-1) if columns else torch.zeros_like(sums)
            sums, target = all_reduce_(torch.stack([sums, target.masked_fill(~here, 0.0)]), tp)
            log_sums.append(shift + sums.log())
            losses.append((log_sums[-1] - target).masked_fill(targets == IGNORE_INDEX, 0.0))
        ctx.save_for_backward(hidden, weight, labels, torch.cat(log_sums))
        ctx.sink = getattr(weight, "gradient_sink", None)
        ctx.columns, ctx.chunk, ctx.tp, ctx.first = columns, chunk, tp, first
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_sum = ctx.saved_tensors
        scale = grad_loss.masked_fill(labels == IGNORE_INDEX, 0.0)
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None
        parts = []
        pieces = (tensor.split(ctx.chunk) for tensor in (hidden, labels, log_sum, scale))
        for rows, targets, sums, factor in zip(*pieces, strict=True):
            gradient = (_logits(rows, weight, ctx.columns) - sums.unsqueeze(-1)).exp_()
            local, here = _local(targets, ctx.first, ctx.columns)
            if ctx.columns:
                gradient.scatter_add_(-1, local, -here.unsqueeze(-1).to(gradient.dtype))
            gradient.mul_(factor.unsqueeze(-1))
            parts.append(gradient @ weight[: ctx.columns].to(wide))
            if total is not None:
                total[: ctx.columns].addmm_(gradient.t(), rows.to(wide))
        grad_hidden = all_reduce_(torch.cat(parts), ctx.tp).to(hidden.dtype)
        if total is not None and ctx.sink is not None:
            finished = total
            ctx.sink.add(lambda main_grad: main_grad.add_(finished))
            total = None
        return grad_hidden, None if total is None else total.to(weight.dtype), None, None, None, None


def _logits(rows: torch.Tensor, weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Return fp32 (fp64 of fp64) logits of the real columns, from a product in the model's type, as the head's is."""
    logits = F.linear(rows, weight[:columns])
    return logits if logits.dtype == torch.float64 else logits.float()


def _local(targets: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets as columns of this rank, `[n, 1]`, and which of them are its own."""
    local = targets - first
    here = (local >= 0) & (local < columns)
    return local.masked_fill(~here, 0).unsqueeze(-1), here


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    tp: Group | None = None,
    chunk: int = 1024,
) -> torch.Tensor:
    """Return the loss of every token, fp32 (fp64 of an fp64 model), in the shape of labels; 0 where the label is -100.

    hidden: `[..., hidden]`, whole sequences, the same on every tp rank; weight: the head's, `[padded_vocab/tp, hidden]`, this
    rank's rows; labels: `[...]`. chunk: tokens whose logits exist at a time.
    Raises ValueError when the weight's rows are not this rank's share of the padded vocabulary, or chunk is below 1.
    """
    share = padded_vocab_size(vocab_size, size_of(tp)) // size_of(tp)
    if weight.shape[0] != share:
        raise ValueError(
            f"the head has {weight.shape[0]} rows, but each of the {size_of(tp)} tp ranks holds {share} "
            f"of a vocabulary of {vocab_size}; pass this rank's rows"
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    columns = max(0, min(share, vocab_size - rank_of(tp) * share))
    rows = hidden.reshape(-1, hidden.shape[-1])
    losses = _LinearCrossEntropy.apply(rows, weight, labels.reshape(-1), columns, chunk, tp)
    return losses.view(labels.shape)

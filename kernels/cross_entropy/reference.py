"""This rank's part of the vocabulary-parallel cross-entropy in plain PyTorch: what the kernel beside it must compute.

A rank holds some columns of the logits. Forward gives what the ranks must exchange, two numbers a row: the log-sum-exp of
its columns, and the target's logit (0 where another rank holds it). The loss of a row is the log-sum-exp over the ranks'
log-sum-exps, minus the sum of their target logits. Backward takes that whole log-sum-exp.
"""

from __future__ import annotations

import torch


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def cross_entropy_forward(
    logits: torch.Tensor, targets: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each row over its first `columns` columns, and its target's logit, both `[...]`, fp32.

    logits: `[..., width]`; targets: int64 `[...]`, counted from this rank's first column; one outside [0, columns) is
    another rank's, and its logit is 0 here. With columns == 0 the log-sum-exp is -inf.
    """
    wide = _widen(logits[..., :columns])
    if columns == 0:
        return wide.new_full(targets.shape, -torch.inf), wide.new_zeros(targets.shape)
    here = (targets >= 0) & (targets < columns)
    target = wide.gather(-1, targets.masked_fill(~here, 0).unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(wide, -1), target.masked_fill(~here, 0.0)


def cross_entropy_backward(
    logits: torch.Tensor, targets: torch.Tensor, log_sum: torch.Tensor, scale: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return (softmax - one-hot of the target) * scale, `[..., width]` in the logits' dtype, 0 in the padding columns.

    log_sum: over the columns of all ranks, `[...]`; scale: the gradient of each row's loss, `[...]`; both fp32.
    """
    gradient = torch.zeros_like(logits)
    probabilities = torch.exp(_widen(logits[..., :columns]) - log_sum.unsqueeze(-1))
    one_hot = targets.unsqueeze(-1) == torch.arange(columns, device=logits.device)
    gradient[..., :columns] = (probabilities - one_hot.to(probabilities.dtype)) * scale.unsqueeze(-1)
    return gradient

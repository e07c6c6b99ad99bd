"""The embedding and the cross-entropy with the vocabulary split over the tp axis.

Rank r holds rows [r * n, (r + 1) * n) of the embedding and the same columns of the logits. n is the same on every rank:
the vocabulary is padded to a multiple of 64 rows a rank, which keeps the GEMM's shape efficient. Padding rows are zero,
and the loss never reads a padding column, so that they enter neither softmax nor any gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from parallax.collectives import all_gather_start, all_reduce_, reduce_from, scatter_sequence
from parallax.kernels.table import has_kernel
from parallax.mesh import Group, rank_of, size_of
from parallax.tensor_parallel.facts import ParameterFacts, sharded

if TYPE_CHECKING:
    from parallax.tensor_parallel.chunked_logits import ChunkedLogits

IGNORE_INDEX = -100
ROW_MULTIPLE = 64


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the smallest multiple of 64 * tp_size that is at least vocab_size."""
    multiple = ROW_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(nn.Module):
    """Token ids `[batch, seq]` to `[batch, seq, hidden]`, each tp rank holding a range of rows.

    sequence_parallel: return `[batch, seq/tp, hidden]`, by a ReduceScatter in place of the AllReduce.
    An id outside the vocabulary is found by no rank and gives zeros: check the data, not the GPU.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: Group | None = None,
        sequence_parallel: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        padded = padded_vocab_size(vocab_size, size_of(tp))
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.weight = nn.Parameter(torch.empty(padded // size_of(tp), hidden_size))
        self.parameter_facts: dict[str, ParameterFacts] = {
            "weight": sharded((vocab_size, hidden_size), 0, tp, padded=padded, std=std, is_table=True)
        }
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=std)
            nn.init.zeros_(self.weight.detach()[self.parameter_facts["weight"].shard_rows :])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.tp.rank * self.weight.shape[0]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return scatter_sequence(rows, self.tp) if self.sequence_parallel else reduce_from(rows, self.tp)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in fp32, or in fp64 if they are."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _whole_log_sum(values: torch.Tensor, target: torch.Tensor, tp: Group | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-sum-exp and target logit over all ranks, of fp32 values that came from bf16, the same in every layout.

    What follows is rounded to bf16 again, and a last bit here would decide a rounding there: so the exponentials are taken of
    the same differences everywhere, and added up in float64.
    """
    greatest = values.amax(-1) if values.shape[-1] else torch.full_like(target, -torch.inf)
    greatest = all_reduce_(greatest, tp, op="max")
    shift = greatest.masked_fill(greatest.isinf(), 0.0)
    sums = (values - shift.unsqueeze(-1)).exp_().sum(-1, dtype=torch.float64)
    sums, target = all_reduce_(torch.stack([sums, target.double()]), tp)
    return (shift + sums.log()).float(), target.float()


def log_sum_and_target(
    logits: torch.Tensor, local: torch.Tensor, columns: int, tp: Group | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each token's logits `[..., vocab/tp]` and the logit of its target, `[...]` each.

    local: each label counted from this rank's first column; the columns from `columns` on are padding. What is returned of bf16
    logits on a CPU is already that over all ranks; `over_ranks` makes it of the others.
    """
    if has_kernel("cross_entropy", logits):
        from parallax.kernels.cross_entropy.kernel import cross_entropy_forward

        return cross_entropy_forward(logits.contiguous(), local.contiguous(), columns)
    values = _wide(logits[..., :columns])
    here = (local >= 0) & (local < columns)
    if columns:
        target = values.gather(-1, local.masked_fill(~here, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    else:
        target = values.new_zeros(local.shape)
    if logits.dtype == torch.bfloat16:
        return _whole_log_sum(values, target, tp)
    return torch.logsumexp(values, -1) if columns else values.new_full(local.shape, -torch.inf), target


def over_ranks(
    logits: torch.Tensor, log_sum: torch.Tensor, target: torch.Tensor, tp: Group | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `log_sum_and_target` found of `logits`, over all tp ranks.

    One small AllGather of each rank's log-sum-exp and target logit does the work of three AllReduces.
    """
    if tp is None or (logits.dtype == torch.bfloat16 and not has_kernel("cross_entropy", logits)):
        return log_sum, target
    gathered, work = all_gather_start(torch.stack([log_sum, target]), tp)
    work.wait()
    return torch.logsumexp(gathered[:, 0], 0), gathered[:, 1].sum(0)


def logits_gradient(
    logits: torch.Tensor, log_sum: torch.Tensor, local: torch.Tensor, scale: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return (softmax - one-hot of the target) * scale, in the logits' shape and type; 0 in the padding columns.

    log_sum: over all ranks. scale: the gradient of each token's loss.
    """
    if has_kernel("cross_entropy", logits):
        from parallax.kernels.cross_entropy.kernel import cross_entropy_backward

        return cross_entropy_backward(
            logits.contiguous(), local.contiguous(), log_sum.contiguous(), scale.contiguous(), columns
        )
    probabilities = (_wide(logits[..., :columns]) - log_sum.unsqueeze(-1)).exp_()
    if columns:
        here = (local >= 0) & (local < columns)
        index = local.masked_fill(~here, 0).unsqueeze(-1)
        probabilities.scatter_add_(-1, index, -here.unsqueeze(-1).to(probabilities.dtype))
    probabilities.mul_(scale.unsqueeze(-1))
    if columns == logits.shape[-1]:
        return probabilities.to(logits.dtype)
    gradient = torch.zeros_like(logits)
    gradient[..., :columns] = probabilities
    return gradient


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, columns: int, tp: Group | None) -> torch.Tensor:
        local = labels - rank_of(tp) * logits.shape[-1]
        log_sum, target = over_ranks(logits, *log_sum_and_target(logits, local, columns, tp), tp)
        ctx.save_for_backward(logits, log_sum, local)
        ctx.columns, ctx.ignored = columns, labels == IGNORE_INDEX
        return (log_sum - target).masked_fill(ctx.ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum, local = ctx.saved_tensors
        scale = grad_loss.masked_fill(ctx.ignored, 0.0)
        return logits_gradient(logits, log_sum, local, scale, ctx.columns), None, None, None


def columns_of(vocab_size: int, tp: Group | None) -> tuple[int, int]:
    """Return how many columns of the logits each rank holds, and how many of this rank's are no padding."""
    share = padded_vocab_size(vocab_size, size_of(tp)) // size_of(tp)
    return share, max(0, min(share, vocab_size - rank_of(tp) * share))


def vocab_parallel_cross_entropy(
    logits: torch.Tensor | ChunkedLogits, labels: torch.Tensor, *, vocab_size: int, tp: Group | None = None
) -> torch.Tensor:
    """Return the loss of every token, fp32 (fp64 of an fp64 model) `[batch, seq]`; 0 where the label is -100.

    logits: `[batch, seq, padded_vocab/tp]`, this rank's columns; labels: `[batch, seq]`, the same on every tp rank.
    vocab_size: columns of the unpadded vocabulary; the width of `logits` must follow from it, so that whole logits handed
        to a tensor-parallel loss are refused.

    Raises ValueError when the width is not this rank's share of the padded vocabulary.
    """
    share, columns = columns_of(vocab_size, tp)
    if logits.shape[-1] != share:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, but each of the {size_of(tp)} tp ranks holds {share} "
            f"of a vocabulary of {vocab_size}; pass this rank's slice, not gathered logits"
        )
    if isinstance(logits, torch.Tensor):
        return _CrossEntropy.apply(logits, labels, columns, tp)
    return logits.cross_entropy(labels, columns, tp)

"""Linear layers whose weight is split over the tp axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

    column:  Y_r = X W_r^T       W split by rows (outputs);   Y stays split, X is whole
    row:     Y = sum_r X_r W_r^T W split by columns (inputs); X is split, Y is whole after an AllReduce

A column-parallel layer followed by a row-parallel one needs one AllReduce forward (at the row's output) and one backward
(at the column's input). With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) the region outside the
pair is split along the sequence: the AllReduce becomes a ReduceScatter there and an AllGather at the column's input; the
gathered input is not kept but gathered again in backward, also by who gathers it outside (gathered_input.py).

Backward starts the communication of the input gradient, computes the weight gradient meanwhile, and then waits. Layers
that read the same input (q, k, v; gate, up) go through one call of `column_parallel`, so they share its communication.

A layer with `products` computes in FP8 (fp8_linear.py).

A weight with a `gradient_sink` (data parallelism sets one) has its gradient product handed to the sink, which adds it to
the flat main gradient in place; autograd then sees no gradient for it. Without a sink it behaves like any parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from parallax.collectives import (
    all_gather,
    all_gather_start,
    all_reduce_,
    all_reduce_start,
    join_ranks,
    reduce_scatter,
    reduce_scatter_start,
)
from parallax.mesh import Group, size_of
from parallax.precision.products import Products
from parallax.tensor_parallel.facts import ParameterFacts, replicated, sharded
from parallax.tensor_parallel.fp8_linear import fp8_column_parallel, fp8_row_parallel
from parallax.tensor_parallel.gathered_input import SEQUENCE_DIM, GatheredInput
from parallax.tensor_parallel.weight_gradients import sink_of_bf16


class GradientSink(Protocol):
    """Where a weight's gradient goes when it is not returned to autograd."""

    def add_product(self, grad_output: torch.Tensor, input: torch.Tensor) -> None:
        """Add `grad_output^T @ input`, of `[tokens, out]` and `[tokens, in]`, to the main gradient `[out, in]`."""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _weight_gradient(sink: GradientSink | None, grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor | None:
    if sink is None:
        return grad_output.t() @ input
    sink.add_product(grad_output, input)
    return None


class _ColumnParallel(torch.autograd.Function):
    """[batch, seq(/tp), in] to one [batch, seq, out_i/tp] per weight; arguments: weights, then their biases."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        tp: Group | None,
        sequence_parallel: bool,
        exact_sums: bool,
        gathered: GatheredInput | None,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        count = len(parameters) // 2
        weights: Sequence[Any] = parameters[:count]
        biases = parameters[count:]
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel and tp is not None
        ctx.exact_sums, ctx.gathered = exact_sums, gathered
        # Read from the parameters themselves: recomputation hands backward detached copies without attributes.
        ctx.sinks = [getattr(weight, "gradient_sink", None) for weight in weights]
        # The input may be wider, for the sum of its gradient with others'; only that has its type.
        ctx.gradient_type, input = input.dtype, input.to(weights[0].dtype)
        kept = input if gathered is None else gathered.kept(any(ctx.needs_input_grad))
        ctx.save_for_backward(kept, *weights)
        whole = all_gather(input, tp, SEQUENCE_DIM) if ctx.sequence_parallel else input
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, *weights = ctx.saved_tensors
        if ctx.sequence_parallel:
            gathered, gathering = all_gather_start(input, ctx.tp)
        grad_rows = [_rows(gradient) for gradient in grad_outputs]
        grad_input, reducing = None, None
        if ctx.needs_input_grad[0]:
            factors = list(zip(grad_rows, weights, strict=True))
            if ctx.exact_sums:
                factors = [(rows.double(), weight.double()) for rows, weight in factors]
            total = factors[0][0] @ factors[0][1]
            for rows, weight in factors[1:]:
                total.addmm_(rows, weight)
            grad_input = total.view(*grad_outputs[0].shape[:-1], total.shape[-1])
        if ctx.sequence_parallel:
            gathering.wait()
            input = join_ranks(gathered, SEQUENCE_DIM)
            if grad_input is not None:
                grad_input, reducing = reduce_scatter_start(grad_input, ctx.tp, SEQUENCE_DIM)
        elif grad_input is not None:
            reducing = all_reduce_start(grad_input, ctx.tp)
        if ctx.gathered is not None:
            input = ctx.gathered.again(input)
        needs = ctx.needs_input_grad[5:]
        input_rows = _rows(input).to(weights[0].dtype)
        grad_weights = [
            _weight_gradient(sink, rows, input_rows) if need else None
            for sink, rows, need in zip(ctx.sinks, grad_rows, needs, strict=False)
        ]
        grad_biases = [
            rows.sum(0) if need else None for rows, need in zip(grad_rows, needs[len(weights) :], strict=True)
        ]
        if reducing is not None:
            reducing.wait()
        grad_input = None if grad_input is None else grad_input.to(ctx.gradient_type)
        return grad_input, None, None, None, None, *grad_weights, *grad_biases


class _RowParallel(torch.autograd.Function):
    """[batch, seq, in/tp] to [batch, seq(/tp), out], summed over tp."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        tp: Group | None,
        sequence_parallel: bool,
        exact_sums: bool,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel and tp is not None
        ctx.sink = getattr(weight, "gradient_sink", None)
        ctx.save_for_backward(input, weight)
        partial = F.linear(input.double(), weight.double()) if exact_sums else F.linear(input, weight)
        if ctx.sequence_parallel:
            return reduce_scatter(partial, tp, SEQUENCE_DIM)
        return all_reduce_(partial, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_output = all_gather(grad_output, ctx.tp, SEQUENCE_DIM)
        rows = _rows(grad_output).to(weight.dtype)
        grad_input = (rows @ weight).view(input.shape) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(ctx.sink, rows, _rows(input)) if ctx.needs_input_grad[4] else None
        return grad_input, None, None, None, grad_weight


def column_parallel(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tp: Group | None,
    sequence_parallel: bool = False,
    exact_sums: bool = False,
    gathered: GatheredInput | None = None,
) -> tuple[torch.Tensor, ...]:
    """Apply several column-parallel weights to one input, sharing its communication forward and backward.

    input: `[batch, seq, in]`, the same on every tp rank, or `[batch, seq/tp, in]` with sequence parallelism.
    weights: `[out_i/tp, in]` each; biases: `[out_i/tp]` or None each.
    exact_sums: add up the input's gradient in float64, over tp too, so that no layout shows in it.
    gathered: what an input came from that was gathered outside (tp is None here), and comes from again in backward.
    Returns `[batch, seq, out_i/tp]` for each.
    """
    return _ColumnParallel.apply(input, tp, sequence_parallel, exact_sums, gathered, *weights, *biases)


def apply_together(
    input: torch.Tensor, *layers: ColumnParallelLinear, communicate: bool = True, gathered: GatheredInput | None = None
) -> tuple[torch.Tensor, ...]:
    """Apply layers to the same input with one communication each way; each gives its `[batch, seq, out/tp]`.

    communicate: False where the caller brings the whole input, and sums its gradient over tp (parallax.tensor_parallel.segments).
    gathered: what the whole input came from then, and comes from again in backward; None to keep it.
    """
    first, tp = layers[0], layers[0].tp if communicate else None
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    products = [layer.products for layer in layers if layer.products is not None]
    if not products:
        return column_parallel(input, weights, biases, tp, first.sequence_parallel, first.exact_sums, gathered)
    if len(products) == len(layers):
        return fp8_column_parallel(input, products, weights, biases, tp, first.sequence_parallel, gathered)
    # Some in FP8 and some not: each communicates alone.
    if first.exact_sums:
        input = input.double()  # for its gradient, which is the sum of theirs: rounded once, wherever that sum is taken
    return tuple(apply_together(input, layer, communicate=communicate, gathered=gathered)[0] for layer in layers)


def _reset(weight: nn.Parameter, bias: nn.Parameter | None, std: float) -> None:
    """Draw a layer's weights from torch's generator; a whole model is initialised by name instead (facts.initialize)."""
    if weight.is_meta:  # shapes only; asking torch to fill them would import its compiler, for seconds
        return
    nn.init.normal_(weight, std=std)
    if bias is not None:
        nn.init.zeros_(bias)


def _check_divides(what: str, size: int, tp: Group | None) -> int:
    if size % size_of(tp):
        raise ValueError(f"{what}={size} does not divide by the tp size {size_of(tp)}")
    return size // size_of(tp)


class ColumnParallelLinear(nn.Module):
    """A linear layer with its outputs split over tp: `[batch, seq, in]` to `[batch, seq, out/tp]`.

    products: how it computes in FP8; None as it is made (parallax.tensor_parallel.precision sets it).

    tp: the tensor-parallel group, or None for an ordinary linear layer.
    sequence_parallel: the input is `[batch, seq/tp, in]` and is gathered here.
    gather_output: return the whole `[batch, seq, out]` on every rank.
    shards: how many different slices there are when neighbouring ranks share one (KV heads fewer than tp).
    padded_out_features: rows including padding (a vocabulary made to divide by tp); padding is zero and never trained.
    std: standard deviation of the initial weights.

    Raises ValueError when out_features does not divide by the number of slices.
    """

    products: Products | None = None
    exact_sums = False  # whether what is summed over tp is summed in float64, as the FP8 reference does

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Group | None = None,
        bias: bool = False,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        shards: int | None = None,
        padded_out_features: int | None = None,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        rows = padded_out_features or out_features
        slices = shards or size_of(tp)
        if rows % slices:
            raise ValueError(f"out_features={rows} does not divide into {slices} slices over the tp size {size_of(tp)}")
        self.tp, self.sequence_parallel, self.gather_output = tp, sequence_parallel, gather_output
        self.weight = nn.Parameter(torch.empty(rows // slices, in_features))
        self.bias = nn.Parameter(torch.empty(rows // slices)) if bias else None
        self.parameter_facts: dict[str, ParameterFacts] = {
            "weight": sharded((out_features, in_features), 0, tp, shards=shards, padded=padded_out_features, std=std),
            "bias": sharded((out_features,), 0, tp, shards=shards, padded=padded_out_features, decays=False),
        }
        _reset(self.weight, self.bias, std)
        if padded_out_features is not None and not self.weight.is_meta:
            nn.init.zeros_(self.weight.detach()[self.parameter_facts["weight"].shard_rows :])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (output,) = apply_together(input, self)
        return GatherLast.apply(output, self.tp) if self.gather_output and self.tp is not None else output


class RowParallelLinear(nn.Module):
    """A linear layer with its inputs split over tp: `[batch, seq, in/tp]` to `[batch, seq, out]`, an AllReduce at the end.

    tp: the tensor-parallel group, or None for an ordinary linear layer.
    sequence_parallel: the output is `[batch, seq/tp, out]`, by a ReduceScatter.
    The bias is held by every rank and added once, after the sum. Raises ValueError when in_features does not divide by tp.
    products: how it computes in FP8; None as it is made.
    """

    products: Products | None = None
    exact_sums = False  # whether what is summed over tp is summed in float64, as the FP8 reference does

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Group | None = None,
        bias: bool = False,
        sequence_parallel: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.weight = nn.Parameter(torch.empty(out_features, _check_divides("in_features", in_features, tp)))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.parameter_facts: dict[str, ParameterFacts] = {
            "weight": sharded((out_features, in_features), 1, tp, std=std),
            "bias": replicated((out_features,), tp, partial=sequence_parallel),
        }
        _reset(self.weight, self.bias, std)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.add_bias(self._apply_to(input, self.tp))

    def part(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum over tp, `[batch, seq, out]`, for callers that communicate and add the bias."""
        return self._apply_to(input, None)

    def _apply_to(self, input: torch.Tensor, tp: Group | None) -> torch.Tensor:
        if self.products is None:
            return _RowParallel.apply(input, tp, self.sequence_parallel, self.exact_sums, self.weight)
        return fp8_row_parallel(input, self.products, self.weight, tp, self.sequence_parallel)

    def add_bias(self, output: torch.Tensor) -> torch.Tensor:
        output = output.to(self.weight.dtype)  # which a sum over tp may exceed
        if self.bias is None:
            return output
        return _AddBias.apply(output, self.bias) if sink_of_bf16(self.bias) is not None else output + self.bias


class _AddBias(torch.autograd.Function):
    """Add a bf16 bias that has a sink, whose gradient is then not rounded."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.sink = sink_of_bf16(bias)
        return output + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.needs_input_grad[1]:
            grad_bias = gradient.float().flatten(0, -2).sum(0)
            ctx.sink.add(lambda total: total.add_(grad_bias))
        return gradient, None


class GatherLast(torch.autograd.Function):
    """Concatenate the ranks' last dims forward; keep this rank's part of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.width = group, tensor.shape[-1]
        return all_gather(tensor, group, tensor.ndim - 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.narrow(-1, ctx.group.rank * ctx.width, ctx.width).contiguous(), None

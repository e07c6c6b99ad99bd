"""Column- and row-parallel linear layers whose products run in FP8; the communication is that of parallax.tensor_parallel.linear.

What travels is never FP8: inputs are gathered in the model's type and quantised whole; parts of a sum over tp are handed on in
float64 by the reference, so that they are rounded once, after the sum, as in one process. Gradients of weights are not: what adds
them up over data-parallel ranks is parallax.data_parallel, in fp32.

The input is kept for backward as it is, which a neighbouring operator often keeps anyway, and quantised again there for wgrad.
What is put off for a later W is the two operands in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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
from parallax.mesh import Group
from parallax.precision.operands import Operand
from parallax.precision.products import Products
from parallax.tensor_parallel.gathered_input import SEQUENCE_DIM, GatheredInput


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _type_of_parts(products: Products, otherwise: torch.dtype) -> torch.dtype:
    """Return the type in which parts of a sum are handed on."""
    return torch.float64 if products.backend.exact_sums else otherwise


def _weight_gradient(
    products: Products, sink: Any, gradient: Operand, input: Operand, weight: torch.Tensor
) -> torch.Tensor | None:
    """Hand dW to the weight's sink, or return it where there is none."""
    add_product = products.wgrad(gradient, input)
    if sink is not None:
        sink.add(add_product)
        return None
    total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    add_product(total)
    return total.to(weight.dtype)


class _ColumnParallel(torch.autograd.Function):
    """[batch, seq(/tp), in] to one [batch, seq, out_i/tp] per weight; parameters: weights, then their biases."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        tp: Group | None,
        sequence_parallel: bool,
        record: bool,
        products: Sequence[Products],
        gathered: GatheredInput | None,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights: Sequence[Any] = parameters[: len(products)]
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel and tp is not None
        ctx.products, ctx.gathered = products, gathered
        ctx.sinks = [getattr(weight, "gradient_sink", None) for weight in weights]
        # The input may be wider, for the sum of its gradient with others'; only that has its type.
        ctx.gradient_type, input = input.dtype, input.to(weights[0].dtype)
        kept = input if gathered is None else gathered.kept(any(ctx.needs_input_grad))
        ctx.save_for_backward(kept, *weights)
        whole = all_gather(input, tp, SEQUENCE_DIM) if ctx.sequence_parallel else input
        rows = _rows(whole)
        operand = products[0].input(rows, record, readers=products[1:])
        outputs = []
        for product, weight, bias in zip(products, weights, parameters[len(products) :], strict=True):
            output = product.fprop(operand, weight, weight.dtype, record)
            output = output if bias is None else output + bias
            outputs.append(output.view(*whole.shape[:-1], output.shape[-1]))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, *weights = ctx.saved_tensors
        products, tp = ctx.products, ctx.tp
        if ctx.sequence_parallel:
            gathered, gathering = all_gather_start(input, tp)
        length = grad_outputs[0].shape[SEQUENCE_DIM]
        grad_rows = [_rows(gradient) for gradient in grad_outputs]
        gradients = [product.gradient(rows, length) for product, rows in zip(products, grad_rows, strict=True)]
        grad_input, reducing = None, None
        if ctx.needs_input_grad[0]:
            wide = _type_of_parts(products[0], torch.float32)
            parts = [
                product.dgrad(gradient, weight, wide)
                for product, (gradient, _), weight in zip(products, gradients, weights, strict=True)
            ]
            total = parts[0]
            for part in parts[1:]:
                total += part
            grad_input = total.view(*grad_outputs[0].shape[:-1], total.shape[-1])
            grad_input = grad_input.to(_type_of_parts(products[0], ctx.gradient_type))
        if ctx.sequence_parallel:
            gathering.wait()
            input = join_ranks(gathered, SEQUENCE_DIM)
            if grad_input is not None:
                grad_input, reducing = reduce_scatter_start(grad_input, tp, SEQUENCE_DIM)
        elif grad_input is not None:
            reducing = all_reduce_start(grad_input, tp)
        if ctx.gathered is not None:
            input = ctx.gathered.again(input)
        needs = ctx.needs_input_grad[6:]
        operand = products[0].input_for_wgrad(_rows(input), length) if any(needs[: len(weights)]) else None
        grad_weights = [
            _weight_gradient(product, sink, gradient, operand, weight) if need and operand is not None else None
            for product, sink, (_, gradient), weight, need in zip(
                products, ctx.sinks, gradients, weights, needs[: len(weights)], strict=True
            )
        ]
        grad_biases = [
            rows.sum(0) if need else None for rows, need in zip(grad_rows, needs[len(weights) :], strict=True)
        ]
        if reducing is not None:
            reducing.wait()
        grad_input = None if grad_input is None else grad_input.to(ctx.gradient_type)
        return grad_input, None, None, None, None, None, *grad_weights, *grad_biases


class _RowParallel(torch.autograd.Function):
    """[batch, seq, in/tp] to [batch, seq(/tp), out], summed over tp."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        tp: Group | None,
        sequence_parallel: bool,
        record: bool,
        products: Products,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.tp, ctx.sequence_parallel, ctx.products = tp, sequence_parallel and tp is not None, products
        ctx.sink = getattr(weight, "gradient_sink", None)
        ctx.save_for_backward(input, weight)
        operand = products.input(_rows(input), record)
        part = products.fprop(operand, weight, _type_of_parts(products, weight.dtype), record)
        part = part.view(*input.shape[:-1], part.shape[-1])
        if ctx.sequence_parallel:
            return reduce_scatter(part, tp, SEQUENCE_DIM)
        return all_reduce_(part, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_output = all_gather(grad_output, ctx.tp, SEQUENCE_DIM)
        products: Products = ctx.products
        for_input, for_weight = products.gradient(_rows(grad_output), input.shape[SEQUENCE_DIM])
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = products.dgrad(for_input, weight, input.dtype).view(input.shape)
        grad_weight = None
        if ctx.needs_input_grad[5]:
            operand = products.input_for_wgrad(_rows(input), input.shape[SEQUENCE_DIM])
            grad_weight = _weight_gradient(products, ctx.sink, for_weight, operand, weight)
        return grad_input, None, None, None, None, grad_weight


def fp8_column_parallel(
    input: torch.Tensor,
    products: Sequence[Products],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tp: Group | None,
    sequence_parallel: bool = False,
    gathered: GatheredInput | None = None,
) -> tuple[torch.Tensor, ...]:
    """Apply several column-parallel weights to one input in FP8; shapes as `linear.column_parallel` has them."""
    record = torch.is_grad_enabled()  # asked here: inside of an autograd function it is off
    return _ColumnParallel.apply(input, tp, sequence_parallel, record, tuple(products), gathered, *weights, *biases)


def fp8_row_parallel(
    input: torch.Tensor, products: Products, weight: torch.Tensor, tp: Group | None, sequence_parallel: bool = False
) -> torch.Tensor:
    """Apply a row-parallel weight in FP8, without bias: `[batch, seq, in/tp]` to `[batch, seq(/tp), out]`.

    The result is in the type in which it was summed, float64 with the reference.
    """
    return _RowParallel.apply(input, tp, sequence_parallel, torch.is_grad_enabled(), products, weight)

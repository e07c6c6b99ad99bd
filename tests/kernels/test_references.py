"""The references against PyTorch's own operators and derivatives, in float64: what the kernels are held to must be right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from parallax.kernels.cross_entropy import reference as cross_entropy
from parallax.kernels.rms_norm import reference as rms_norm
from parallax.kernels.swiglu import reference as swiglu
from tests.kernels.cases import random


def leaf(*shape: int, seed: int) -> torch.Tensor:
    return random(*shape, dtype=torch.float64, seed=seed).requires_grad_()


def test_rms_norm_equals_torch_and_its_derivative() -> None:
    input, weight, gradient = leaf(2, 3, 37, seed=0), leaf(37, seed=1), random(2, 3, 37, dtype=torch.float64, seed=2)
    output, inverse = rms_norm.rms_norm_forward(input, weight, 1e-5)
    expected = F.rms_norm(input, (37,), weight, 1e-5)
    torch.testing.assert_close(output, expected)
    result = rms_norm.rms_norm_backward(gradient, input, weight, inverse)
    torch.testing.assert_close(result, torch.autograd.grad(expected, [input, weight], gradient))


def test_rms_norm_rounds_before_the_product_as_hugging_face_does() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(130, eps=1e-5).bfloat16()
    norm.weight.data = random(130, dtype=torch.bfloat16, seed=1)
    input = random(37, 130, dtype=torch.bfloat16)
    assert torch.equal(rms_norm.rms_norm_forward(input, norm.weight, 1e-5)[0], norm(input))


def test_swiglu_equals_torch_and_its_derivative() -> None:
    gate, up, gradient = leaf(3, 37, seed=0), leaf(3, 37, seed=1), random(3, 37, dtype=torch.float64, seed=2)
    expected = F.silu(gate) * up
    torch.testing.assert_close(swiglu.swiglu_forward(gate, up), expected)
    result = swiglu.swiglu_backward(gradient, gate, up)
    torch.testing.assert_close(result, torch.autograd.grad(expected, [gate, up], gradient))


def test_swiglu_rounds_as_torch_does() -> None:
    gate, up = random(3, 1000, dtype=torch.bfloat16), random(3, 1000, dtype=torch.bfloat16, seed=1)
    torch.testing.assert_close(swiglu.swiglu_forward(gate, up), F.silu(gate) * up, rtol=2**-7, atol=0)


def test_cross_entropy_over_two_ranks_equals_torch_and_its_derivative() -> None:
    vocabulary, width, targets = 100, 64, torch.tensor([0, 63, 64, 99, 7])  # the second rank has 28 columns of padding
    logits, scale = leaf(5, vocabulary, seed=0), random(5, dtype=torch.float64, seed=1)
    whole = torch.cat([logits.detach(), torch.full((5, 28), torch.nan)], 1)
    ranks = [(whole[:, :width], targets, width), (whole[:, width:], targets - width, vocabulary - width)]
    sums, picked = zip(*(cross_entropy.cross_entropy_forward(*rank) for rank in ranks), strict=True)
    log_sum = torch.logsumexp(torch.stack(sums), 0)
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(log_sum - sum(picked), expected)
    parts = [cross_entropy.cross_entropy_backward(part, local, log_sum, scale, n) for part, local, n in ranks]
    gradient = torch.cat(parts, 1)
    torch.testing.assert_close(gradient[:, :vocabulary], torch.autograd.grad(expected, logits, scale)[0])
    assert not gradient[:, vocabulary:].any()


def test_cross_entropy_of_a_rank_with_only_padding_is_an_empty_sum() -> None:
    logits, targets = torch.full((2, 64), torch.nan), torch.tensor([-3, 5])
    log_sum, target = cross_entropy.cross_entropy_forward(logits, targets, 0)
    assert torch.equal(log_sum, torch.full((2,), -torch.inf)) and not target.any()
    assert not cross_entropy.cross_entropy_backward(logits, targets, torch.ones(2), torch.ones(2), 0).any()


def test_the_written_out_derivatives_pass_gradcheck() -> None:
    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            output, inverse = rms_norm.rms_norm_forward(input, weight, 1e-5)
            ctx.save_for_backward(input, weight, inverse)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return rms_norm.rms_norm_backward(gradient, *ctx.saved_tensors)

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate, up)
            return swiglu.swiglu_forward(gate, up)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return swiglu.swiglu_backward(gradient, *ctx.saved_tensors)

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, columns: int) -> torch.Tensor:
            log_sum, target = cross_entropy.cross_entropy_forward(logits, targets, columns)
            ctx.save_for_backward(logits, targets, log_sum)
            ctx.columns = columns
            return log_sum - target

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return cross_entropy.cross_entropy_backward(*ctx.saved_tensors, gradient, ctx.columns), None, None

    assert torch.autograd.gradcheck(Norm.apply, (leaf(3, 5, seed=0), leaf(5, seed=1)))
    assert torch.autograd.gradcheck(SwiGLU.apply, (leaf(3, 5, seed=0), leaf(3, 5, seed=1)))
    assert torch.autograd.gradcheck(CrossEntropy.apply, (leaf(3, 7, seed=0), torch.tensor([0, 4, 5]), 5))

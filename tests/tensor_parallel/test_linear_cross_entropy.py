"""The chunked head and loss against the whole logits, in float64 and bf16, over one rank and several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallax.mesh import Layout, Mesh
from parallax.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from parallax.tensor_parallel.vocabulary import padded_vocab_size
from parallax.tensor_parallel.weight_gradients import WeightSink
from tests.distributed.harness import run_layout

VOCABULARY = 131  # over 4 ranks the last one has padding


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 7, 16), (VOCABULARY, 16)))
    labels = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    labels[0, 1] = labels[2, 6] = -100
    return hidden, weight, labels, torch.rand(3, 7, generator=generator)


def expected(dtype: torch.dtype) -> list[torch.Tensor]:
    hidden, weight, labels, scale = data(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    losses = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none").view(3, 7)
    return [losses.detach(), *torch.autograd.grad(losses, [hidden, weight], scale.double())]


def _on_ranks(mesh: Mesh, dtype: torch.dtype, chunk: int) -> list[torch.Tensor]:
    """Return losses and the gradients of the hidden states and of this rank's rows."""
    hidden, weight, labels, scale = data(dtype)
    padded = F.pad(weight, (0, 0, 0, padded_vocab_size(VOCABULARY, mesh.layout.tp) - VOCABULARY))
    rows = padded.chunk(mesh.layout.tp)[mesh.tp_rank].clone().requires_grad_()
    hidden.requires_grad_()
    losses = linear_cross_entropy(hidden, rows, labels, vocab_size=VOCABULARY, tp=mesh.tp, chunk=chunk)
    return [losses.detach(), *torch.autograd.grad(losses, [hidden, rows], scale.to(losses.dtype))]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_losses_and_gradients_equal_those_of_the_whole_logits(tp: int, chunk: int) -> None:
    losses, grad_hidden, grad_weight = expected(torch.float64)
    results = run_layout(Layout(tp=tp), _on_ranks, torch.float64, chunk)
    for result in results:
        torch.testing.assert_close(result[0], losses)
        torch.testing.assert_close(result[1], grad_hidden)
    whole = torch.cat([result[2] for result in results])
    torch.testing.assert_close(whole[:VOCABULARY], grad_weight)
    assert not whole[VOCABULARY:].any()


def test_in_bf16_many_chunks_lose_nothing() -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    losses, grad_hidden, grad_weight = expected(torch.bfloat16)
    for chunk in (1, 21):
        result = _on_ranks(mesh, torch.bfloat16, chunk)
        assert result[0].dtype == torch.float32
        assert ((result[0] - losses).sum() / losses.sum()).abs() < 1e-3
        for got, want in ((result[1], grad_hidden), (result[2][:VOCABULARY], grad_weight)):
            assert (got.double() - want).norm() < 2e-2 * want.norm()


def test_the_weights_gradient_goes_to_its_sink() -> None:
    hidden, weight, labels, scale = data(torch.float32)
    parameter = torch.nn.Parameter(torch.cat([weight, torch.zeros(padded_vocab_size(VOCABULARY, 1) - VOCABULARY, 16)]))
    vars(parameter)["gradient_sink"] = WeightSink(parameter)
    losses = linear_cross_entropy(hidden, parameter, labels, vocab_size=VOCABULARY, chunk=5)
    losses.backward(scale)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad[:VOCABULARY].double(), expected(torch.float32)[2], rtol=1e-4, atol=1e-5)


def test_rows_that_are_no_share_are_refused() -> None:
    with pytest.raises(ValueError, match="the head has 100 rows, but each of the 1 tp ranks holds"):
        linear_cross_entropy(torch.ones(2, 4), torch.ones(100, 4), torch.zeros(2, dtype=torch.int64), vocab_size=300)

"""Losses of chunked logits: those of whole logits, in value, gradients and collectives, without whole logits ever being there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.collectives import all_reduce_
from parallax.mesh import Layout, Mesh, rank_of, size_of
from parallax.tensor_parallel.chunked_logits import ChunkedLogits
from parallax.tensor_parallel.vocabulary import padded_vocab_size, vocab_parallel_cross_entropy
from tests.distributed.harness import run_layout

VOCAB, HIDDEN, BATCH, SEQ = 131, 12, 2, 9


def _inputs(dtype: torch.dtype, tp: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden, the whole padded head, labels of which some are left out and which lie strided, as those of samples do."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.zeros(padded_vocab_size(VOCAB, tp), HIDDEN, dtype=dtype)
    weight[:VOCAB] = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)[:, 1:]
    return hidden, weight, labels.masked_fill(labels % 5 == 0, -100)


def _losses(mesh: Mesh, dtype: torch.dtype, chunk: int) -> dict[str, torch.Tensor]:
    hidden, weight, labels = _inputs(dtype, size_of(mesh.tp))
    share = len(weight) // size_of(mesh.tp)
    mine = weight[rank_of(mesh.tp) * share :][:share].clone().requires_grad_()
    hidden.requires_grad_()
    logits: Any = ChunkedLogits(hidden, mine, chunk) if chunk else F.linear(hidden, mine)
    losses = vocab_parallel_cross_entropy(logits, labels, vocab_size=VOCAB, tp=mesh.tp)
    (losses * torch.linspace(0.5, 2.0, losses.numel(), dtype=losses.dtype).view_as(losses)).sum().backward()
    assert hidden.grad is not None and mine.grad is not None
    return {"losses": losses.detach(), "hidden": all_reduce_(hidden.grad, mesh.tp), "weight": mine.grad}


def _cases(mesh: Mesh) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    return [
        (_losses(mesh, dtype, 0), _losses(mesh, dtype, chunk))
        for dtype in (torch.float64, torch.float32)
        for chunk in (1, 5, 6, 17)
    ]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_chunks_of_any_size_give_the_losses_and_gradients_of_whole_logits(tp: int) -> None:
    for cases in run_layout(Layout(tp=tp), _cases):
        for whole, chunked in cases:
            tolerance = 1e-12 if whole["losses"].dtype == torch.float64 else 1e-5
            for name, tensor in whole.items():
                torch.testing.assert_close(chunked[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_the_losses_are_those_of_torch() -> None:
    hidden, weight, labels = _inputs(torch.float64, 1)
    logits = F.linear(hidden, weight[:VOCAB]).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=-100).view(BATCH, SEQ)
    got = vocab_parallel_cross_entropy(ChunkedLogits(hidden, weight, 4), labels, vocab_size=VOCAB)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def _narrow(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    return _losses(mesh, torch.bfloat16, 0)["losses"], _losses(mesh, torch.bfloat16, 5)["losses"]


def test_bf16_losses_are_bitwise_the_same_in_every_layout_and_chunk() -> None:
    expected = run_layout(Layout(), _narrow)[0][0]
    for whole, chunked in run_layout(Layout(tp=2), _narrow):
        assert torch.equal(whole, expected) and torch.equal(chunked, expected)


class _Largest(TorchDispatchMode):
    """Notes the most elements that any result of any operation has."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def _largest_tensor(chunk: int) -> int:
    hidden, weight = torch.randn(2, 256, 8, requires_grad=True), torch.randn(640, 8, requires_grad=True)
    labels = torch.randint(0, 600, (2, 256))
    with _Largest() as seen:
        logits: Any = ChunkedLogits(hidden, weight, chunk) if chunk else F.linear(hidden, weight)
        vocab_parallel_cross_entropy(logits, labels, vocab_size=600).sum().backward()
    return seen.largest


def test_no_tensor_is_larger_than_a_chunk_of_the_logits() -> None:
    assert _largest_tensor(0) == 512 * 640
    assert _largest_tensor(32) == 32 * 640

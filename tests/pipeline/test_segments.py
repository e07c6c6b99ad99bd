"""Segments: what is kept between a forward and its backward, and that gradients are those of the whole."""

from __future__ import annotations

import weakref

import torch

from parallax.pipeline.segments import alone, backward_steps, forward_steps
from parallax.tensor_parallel.segments import Arriving, Segment
from parallax.tensor_parallel.weight_gradients import WeightQueue

WEIGHT = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()


class _Arrived:
    def __init__(self, tensor: torch.Tensor, seen: list[weakref.ref]) -> None:
        self.tensor = tensor.clone()
        seen.append(weakref.ref(self.tensor.untyped_storage()))

    def wait(self) -> torch.Tensor:
        return self.tensor


def _add_up(seen: list[weakref.ref]) -> list[Segment]:
    """Return a product, and a sum that needs nothing of its inputs for backward."""

    def arriving(tensor: torch.Tensor) -> Arriving:
        return _Arrived(tensor, seen)

    return [
        Segment(lambda tensor: (tensor @ WEIGHT, tensor), forward=arriving),
        Segment(lambda product, tensor: ((product + 2 * tensor).sum(),)),
    ]


def test_what_arrives_and_no_operator_keeps_is_gone_after_the_forward() -> None:
    seen: list[weakref.ref] = []
    input = torch.ones(2, 4, dtype=torch.float64)
    loss, trace = alone(forward_steps(_add_up(seen), input, train=True, keep_output=True))
    assert len(seen) == 1 and seen[0]() is None
    assert trace is not None and trace.has_gradient

    WEIGHT.grad = None
    gradient = alone(backward_steps(trace, None, WeightQueue(), 0, split=False))
    whole = input.clone().requires_grad_()
    expected = torch.autograd.grad((whole @ WEIGHT + 2 * whole).sum(), [whole, WEIGHT])
    torch.testing.assert_close([gradient, WEIGHT.grad], list(expected), rtol=0, atol=0)
    assert loss.item() == (input @ WEIGHT + 2 * input).sum().item()


def test_an_input_that_nothing_depends_on_has_a_gradient_of_zeros() -> None:
    segments = [Segment(lambda _: (WEIGHT.sum(),))]
    _, trace = alone(forward_steps(segments, torch.ones(3, 2), train=True, keep_output=True))
    assert trace is not None
    gradient = alone(backward_steps(trace, None, WeightQueue(), 0, split=False))
    assert gradient is not None and torch.equal(gradient, torch.zeros(3, 2))


def test_token_ids_have_no_gradient() -> None:
    segments = [Segment(lambda ids: (WEIGHT[ids].sum(),))]
    _, trace = alone(forward_steps(segments, torch.tensor([1, 2]), train=True, keep_output=True))
    assert trace is not None
    assert alone(backward_steps(trace, None, WeightQueue(), 0, split=False)) is None

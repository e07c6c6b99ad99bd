"""A small float64 model cut into stages, with its loss and gradients computed plainly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss

from parallax.tensor_parallel.linear import ColumnParallelLinear

HIDDEN = 6
ROWS = 3


def make_layers(num_stages: int, parallel: bool = False) -> list[nn.Module]:
    """Return one layer per stage; the same on every process.

    parallel: ours, which can put off the gradients of their weights; otherwise torch's.
    """
    generator = torch.Generator().manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(num_stages):
        layer = ColumnParallelLinear(HIDDEN, HIDDEN, bias=True) if parallel else nn.Linear(HIDDEN, HIDDEN)
        layer = layer.double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        layers.append(nn.Sequential(layer, nn.Tanh()))
    return layers


def make_batch(num_micro_batches: int) -> torch.Tensor:
    """Return inputs and targets, `[micro_batch, 2, rows, hidden]`."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_micro_batches, 2, ROWS, HIDDEN, generator=generator, dtype=torch.float64)


def make_stages(layers: list[nn.Module], batch: torch.Tensor) -> dict[int, Callable]:
    """Return the stage functions: the first reads its micro-batch, the last returns the loss divided by their number."""

    def stage(index: int) -> Callable:
        def call(tensor: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
            assert (tensor is None) == (index == 0)
            hidden = layers[index](batch[micro_batch, 0] if tensor is None else tensor)
            if index < len(layers) - 1:
                return hidden
            return mse_loss(hidden, batch[micro_batch, 1]) / len(batch)

        return call

    return {index: stage(index) for index in range(len(layers))}


def plain_losses_and_gradients(num_stages: int, num_micro_batches: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return each micro-batch's loss, and per parameter the gradient of their sum, from one graph over the whole."""
    layers, batch = make_layers(num_stages), make_batch(num_micro_batches)
    hidden = nn.Sequential(*layers)(batch[:, 0])
    losses = (hidden - batch[:, 1]).square().mean(dim=(1, 2)) / num_micro_batches
    losses.sum().backward()
    return losses.tolist(), gradients_of(layers)


def gradients_of(layers: list[nn.Module]) -> list[torch.Tensor]:
    """Return the gradients of all parameters, in order."""
    return [parameter.grad for layer in layers for parameter in layer.parameters() if parameter.grad is not None]


class Listener:
    """Notes what an executor says of gradients: ("last" | "before" | "after", stage)."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def expect_last_backward(self, stage: int) -> None:
        self.told.append(("last", stage))

    def before_backward(self, stage: int) -> None:
        self.told.append(("before", stage))

    def after_backward(self, stage: int) -> None:
        self.told.append(("after", stage))

"""The scales of delayed scaling for all layers of a rank, from step to step, in any layout the same.

Scales change between steps only: all micro-batches of a step, in whatever order a schedule runs them, see the same ones, and so
does a forward that is computed again in backward. The amax of a step is the greatest over its micro-batches and over all ranks
that hold a part or a copy of the layer: tp, dp, and the second holder of a stage under DualPipe, never another stage's.

A step that is skipped, for its numbers are bad, leaves scales and histories as they were, as it leaves the weights.

No scale is known before a first step. That one runs with its operands as they are, in bf16, and is only measured: with scales
of 1 its gradients, of 1e-6 and less, would all be rounded to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallax.collectives import all_reduce_, gather_json
from parallax.mesh import Group, Mesh, size_of
from parallax.precision.delayed import DelayedScaling
from parallax.precision.recipe import Recipe

FORWARD = ("input", "weight")
TENSORS = (*FORWARD, "gradient")


class Scales:
    """Scales and amax histories of the layers of this rank.

    layers: {name: the group of all ranks that hold it, None for this one alone}.
    """

    def __init__(self, recipe: Recipe, layers: Mapping[str, Group | None], device: torch.device | str = "cpu") -> None:
        self.layers, count = dict(layers), len(layers)
        self._forward = DelayedScaling(
            recipe.amax_history_len, recipe.margin, "e4m3", shape=(count, len(FORWARD)), device=device
        )
        self._backward = DelayedScaling(
            recipe.amax_history_len, recipe.margin, recipe.gradient_format, shape=(count, 1), device=device
        )
        self.amax = torch.zeros(count, len(TENSORS), device=device)  # of the step that is under way
        self.scale = torch.ones(count, len(TENSORS), device=device)
        self.known = False  # whether a step has been measured
        rows: dict[Group | None, list[int]] = {}
        for index, group in enumerate(layers.values()):
            rows.setdefault(group, []).append(index)
        # On the device from the start: a list as an index would be copied there in each step, and the host would wait for it.
        self._rows = {group: torch.tensor(indices).to(device) for group, indices in rows.items()}

    def slots(self, layer: str) -> Slots:
        return Slots(self, list(self.layers).index(layer))

    def agree(self) -> torch.Tensor:
        """Agree with all holders on the amaxes of the step that is over; called by all ranks.

        Returns this rank's share, float64, in the number of those that are infinite: summed over the world each counts once.
        """
        # The maximum of a group need not keep NaN; inf has the same effect.
        self.amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        for group, indices in self._rows.items():
            if group is not None:
                self.amax[indices] = all_reduce_(self.amax[indices], group, op="max")
        infinite = self.amax.isinf().sum(1).double()
        return sum(
            (infinite[indices].sum() / size_of(group) for group, indices in self._rows.items()), infinite.new_zeros(())
        )

    def finish_step(self, skip: torch.Tensor | None = None) -> None:
        """Make the scales of the next step from the amaxes of `agree`; skip: scalar, 1 for a step that does not count."""
        self._forward.advance(self.amax[:, : len(FORWARD)], skip)
        self._backward.advance(self.amax[:, len(FORWARD) :], skip)
        self._join()

    def _join(self) -> None:
        self.scale = torch.cat([self._forward.scale, self._backward.scale], 1)
        self.amax.zero_()
        # What the next step runs depends on it, so the host waits for it, until there is a step that counts and never again.
        self.known = self.known or bool(self._forward.num_updates > 0)

    def describe_infinite(self, count: int) -> str:
        """Return what it means that so many amaxes of a step are infinite."""
        return self._forward.describe_infinite(count)

    def to_dict(self) -> dict[str, Any]:
        """Return {layer: {tensor: its scale and history}} as JSON can carry it, and the steps measured."""
        history = torch.cat([self._forward.amax_history, self._backward.amax_history], 2).permute(1, 2, 0)
        scales, histories = self.scale.tolist(), history.tolist()
        layers = {
            name: {
                tensor: {"scale": scales[i][j], "amax_history": [_to_json(amax) for amax in histories[i][j]]}
                for j, tensor in enumerate(TENSORS)
            }
            for i, name in enumerate(self.layers)
        }
        return {"num_updates": int(self._forward.num_updates), "layers": layers}

    def load_dict(self, stored: Mapping[str, Any]) -> None:
        """Go on from what the `to_dict` of ranks that held these layers gave."""
        self.known = False
        layers: Sequence[Any] = [stored["layers"][name] for name in self.layers]
        for scaling, names in ((self._forward, FORWARD), (self._backward, TENSORS[len(FORWARD) :])):
            scale = [[layer[name]["scale"] for name in names] for layer in layers]
            history = [[[float(amax) for amax in layer[name]["amax_history"]] for name in names] for layer in layers]
            length = len(scaling.amax_history)
            shape = len(layers), len(names)
            scaling.load_state_dict(
                {
                    "scale": torch.tensor(scale).reshape(shape),
                    "amax_history": torch.tensor(history).reshape(*shape, length).permute(2, 0, 1),
                    "num_updates": stored["num_updates"],
                }
            )
        self._join()


def gather_scales(scales: Scales, mesh: Mesh) -> dict[str, Any]:
    """Return the scales of all pipeline stages as one `Scales.to_dict`; called by all ranks."""
    rows = gather_json(scales.to_dict(), mesh.pp, mesh.device)
    return {**rows[0], "layers": {name: layer for row in rows for name, layer in row["layers"].items()}}


def _to_json(amax: float) -> float | str:
    return amax if amax < float("inf") else "inf"  # JSON has no word for it


@dataclass(frozen=True, eq=False)
class Slots:
    """The scales of one layer's tensors: "input", "weight" and "gradient"."""

    scales: Scales
    index: int

    @property
    def known(self) -> bool:
        return self.scales.known

    def scale(self, tensor: str) -> torch.Tensor:
        """Return the fp32 scalar for this step."""
        return self.scales.scale[self.index, TENSORS.index(tensor)]

    def record(self, tensor: str, x: torch.Tensor) -> None:
        """Take the amax of x into account for the steps to come."""
        if x.numel():
            amax = self.scales.amax[self.index, TENSORS.index(tensor)]
            amax.copy_(torch.maximum(amax, x.abs().amax()))

    def follow(self, tensor: str, other: Slots) -> None:
        """Take the amax that another layer has of the same tensor."""
        column = TENSORS.index(tensor)
        mine, theirs = self.scales.amax[self.index, column], other.scales.amax[other.index, column]
        mine.copy_(torch.maximum(mine, theirs))

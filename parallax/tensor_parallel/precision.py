"""Give the linear layers of a model their products in FP8, as a recipe says, and keep what goes on from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from parallax.mesh import Group, Mesh, Replicas
from parallax.precision.backends.choose import Choice
from parallax.precision.operands import Cut
from parallax.precision.products import Products
from parallax.precision.recipe import Recipe
from parallax.precision.scales import Scales
from parallax.precision.tiles import TILE_SIZE
from parallax.tensor_parallel.facts import ParameterFacts
from parallax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

ParallelLinear = ColumnParallelLinear | RowParallelLinear


@dataclass(frozen=True, eq=False)
class Fp8State:
    """What FP8 keeps on this rank. choice: the backend, and why. scales: of delayed scaling; None with tiles."""

    choice: Choice
    products: dict[str, Products]
    scales: Scales | None

    def begin_step(self) -> None:
        """From here to `finish_step` no weight changes: each is quantised once."""
        for product in self.products.values():
            product.weights.open = True

    def agree(self) -> torch.Tensor | None:
        """After backward: agree on what was measured, see `Scales.agree`; called by all ranks. None if nothing is measured."""
        return None if self.scales is None else self.scales.agree()

    def finish_step(self, skip: torch.Tensor) -> None:
        """Forget the quantised weights, and make the next step's scales; skip: scalar, 1 if the step does not count."""
        for product in self.products.values():
            product.weights.open, product.weights.operands = False, None
        if self.scales is not None:
            self.scales.finish_step(skip)


def apply_recipe(modules: Iterable[nn.Module], recipe: Recipe, choice: Choice, mesh: Mesh) -> Fp8State:
    """Let every parallel linear layer that the recipe does not keep in bf16 run in FP8; return what is to be kept of it.

    modules: this rank's stages, whose submodules have the names that patterns of the recipe match. Called by every rank of
    the mesh. A train step calls `begin_step`, `agree` and `finish_step` of the result.
    """
    backend = choice.backend
    layers: dict[str, ParallelLinear] = {}
    for module in modules:
        for name, layer in module.named_modules():
            if hasattr(layer, "exact_sums"):  # also of layers that stay in bf16
                layer.exact_sums = backend.exact_sums
            if isinstance(layer, ParallelLinear) and not recipe.keeps(name):
                layers[name] = layer
    scales = _make_scales(layers, recipe, mesh) if recipe.scaling == "delayed" else None
    for name, layer in layers.items():
        outputs, inputs = _cuts(layer.parameter_facts["weight"], layer.tp)
        slots = None if scales is None else scales.slots(name)
        layer.products = Products(recipe, backend, outputs, inputs, slots)
    return Fp8State(
        choice, {name: layer.products for name, layer in layers.items() if layer.products is not None}, scales
    )


def _make_scales(layers: dict[str, ParallelLinear], recipe: Recipe, mesh: Mesh) -> Scales:
    kinds = {
        # Every tp rank has a part of the layer, or a copy of one.
        name: Replicas(mesh.layout.tp, layer.parameter_facts["weight"].replicas.stages)
        for name, layer in layers.items()
    }
    groups = mesh.holders(kinds.values())
    return Scales(recipe, {name: groups[kind] for name, kind in kinds.items()}, mesh.device)


def _cuts(facts: ParameterFacts, tp: Group | None) -> tuple[Cut | None, Cut | None]:
    """Return how the rows and the columns of a weight are cut over tp, where that goes through a tile."""
    if tp is None or facts.shard_dim is None:
        return None, None
    cut = Cut(facts.shard_start, facts.shard_rows, facts.full_shape[facts.shard_dim], tp)
    if not cut.shared(TILE_SIZE):
        return None, None
    return (cut, None) if facts.shard_dim == 0 else (None, cut)

"""Give the linear layers of a model their products in FP8, as a recipe says, and keep what goes on from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from parallax.mesh import Group, Mesh, Replicas
from parallax.precision.backends.choose import Choice
from parallax.precision.operands import Cut
from parallax.precision.products import Products, WeightCache
from parallax.precision.recipe import Recipe
from parallax.precision.scales import Scales
from parallax.precision.tiles import TILE_SIZE
from parallax.tensor_parallel.facts import ParameterFacts
from parallax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallax.tensor_parallel.scopes import Keeper, ParameterScope

ParallelLinear = ColumnParallelLinear | RowParallelLinear


@dataclass(eq=False)
class CopyMeter:
    """The most bytes that the quantised weights of a rank's layers took at once, while it is on."""

    caches: Sequence[WeightCache]
    on: bool = False
    peak: int = 0

    def look(self) -> None:
        """Measure; called before any of them is forgotten."""
        if self.on:
            self.peak = max(self.peak, sum(cache.nbytes for cache in self.caches))


class ForgettingKeeper:
    """Around the keeper of a scope whose weights come and go (ZeRO 3): what was made of them goes when they go.

    Quantised anew at the next use they have the same bytes. Uses may nest and overlap, as the keeper's do: it counts.
    """

    def __init__(self, keeper: Keeper, caches: Sequence[WeightCache], meter: CopyMeter) -> None:
        self._keeper, self._caches, self._meter, self._num_uses = keeper, caches, meter, 0

    def gather(self, scope: ParameterScope, backward: bool) -> None:
        self._keeper.gather(scope, backward)
        self._num_uses += 1

    def release(self, scope: ParameterScope) -> None:
        self._num_uses -= 1
        if not self._num_uses:
            self._meter.look()
            for cache in self._caches:
                cache.forget()
        self._keeper.release(scope)


@dataclass(frozen=True, eq=False)
class Fp8State:
    """What FP8 keeps on this rank.

    choice: the backend, and why. layers: those that run in FP8. scales: of delayed scaling; None with tiles.
    """

    choice: Choice
    layers: dict[str, ParallelLinear]
    scales: Scales | None
    meter: CopyMeter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "meter", CopyMeter([product.weights for product in self.products.values()]))

    @property
    def products(self) -> dict[str, Products]:
        return {name: layer.products for name, layer in self.layers.items() if layer.products is not None}

    def forget_with(self, scopes: Iterable[ParameterScope], gathered: set[nn.Parameter]) -> None:
        """Let what is made of weights that are `gathered` for each use of their scope go when they go."""
        cache_of = {
            layer.weight: layer.products.weights
            for layer in self.layers.values()
            if layer.products is not None and layer.weight in gathered
        }
        for scope in scopes:
            caches = [cache_of[parameter] for parameter in scope.parameters() if parameter in cache_of]
            if caches and scope.keeper is not None:
                scope.keeper = ForgettingKeeper(scope.keeper, caches, self.meter)

    @contextmanager
    def measuring(self) -> Iterator[CopyMeter]:
        """Measure the steps that are done in here; `peak` of the result has their bytes."""
        self.meter.on, self.meter.peak = True, 0
        try:
            yield self.meter
        finally:
            self.meter.on = False

    def begin_step(self) -> None:
        """From here to `finish_step` no weight changes: each is quantised once, or once for each time that it is gathered."""
        for cache in self.meter.caches:
            cache.open = True

    def agree(self) -> torch.Tensor | None:
        """After backward: agree on what was measured, see `Scales.agree`; called by all ranks. None if nothing is measured."""
        return None if self.scales is None else self.scales.agree()

    def finish_step(self, skip: torch.Tensor) -> None:
        """Forget the quantised weights, and make the next step's scales; skip: scalar, 1 if the step does not count."""
        self.meter.look()
        for cache in self.meter.caches:
            cache.open = False
            cache.forget()
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
    return Fp8State(choice, layers, scales)


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

"""The bytes of a weight's copies in FP8, by arithmetic and as backends make them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from parallax.mesh import Group
from parallax.precision import operands
from parallax.precision.backends.reference import ReferenceBackend
from parallax.precision.backends.te import TeOperand
from parallax.precision.backends.torch_scaled import laid_out
from parallax.precision.backends.triton import ready
from parallax.precision.copies import copies_of, copies_of_ranks
from parallax.precision.operands import Cut, Operand
from parallax.precision.products import Products, WeightCache
from parallax.precision.recipe import Recipe
from parallax.precision.scales import Scales


class Laying(ReferenceBackend):
    """Quantises as every backend does, and lays the weight out as one of them hands it to its library."""

    def __init__(self, lay_out: Callable[[Operand], object]) -> None:
        self._lay_out = lay_out

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        self._lay_out(b)
        return torch.zeros(a.data.shape[0], b.data.shape[0], dtype=dtype)


BACKENDS = {"reference": ReferenceBackend(), "torch": Laying(laid_out), "triton": Laying(ready)}


def made(backend: str, recipe: Recipe, shape: tuple[int, int], cut: tuple[int, Cut] | None = None) -> tuple[int, ...]:
    """Return the bytes of the copies after a forward, after a backward alone, and after both, one after the other."""
    if backend == "torch" and not hasattr(F, "scaled_mm"):
        pytest.skip("this torch has no torch.nn.functional.scaled_mm")
    slots = None
    if recipe.scaling == "delayed":
        scales = Scales(recipe, {"layer": None})
        scales.known, slots = True, scales.slots("layer")
    cuts = [cut[1] if cut is not None and cut[0] == dim else None for dim in (0, 1)]
    layer = Products(recipe, BACKENDS[backend], cuts[0], cuts[1], slots)
    layer.weights.open = True
    (rows, columns), tokens = shape, 32
    weight, x, dy = torch.randn(rows, columns).bfloat16(), torch.randn(tokens, columns), torch.randn(tokens, rows)
    sizes = []

    def forward() -> None:
        layer.fprop(layer.input(x, record=False), weight, torch.float32, record=False)

    def backward() -> None:
        layer.dgrad(layer.gradient(dy, tokens)[0], weight, torch.float32)

    for uses in ((forward,), (backward,), (forward, backward, forward)):
        layer.weights.forget()
        assert layer.weights.nbytes == 0
        for use in uses:
            use()
        sizes.append(layer.weights.nbytes)
    return tuple(sizes)


def planned(backend: str, recipe: Recipe, shape: tuple[int, int], lead: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    copies = copies_of(backend, recipe, shape, lead)
    return copies.forward, copies.backward, copies.both


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_takes_the_bytes_that_a_backend_makes_of_it(backend: str) -> None:
    shapes = [(256, 384), (128, 128), (128, 512), (512, 128), (640, 1152), (48, 80), (688, 256), (256, 688)]
    for shape in shapes:
        assert planned(backend, Recipe(), shape) == made(backend, Recipe(), shape), shape
        assert planned(backend, Recipe(scaling="delayed"), shape) == made(backend, Recipe(scaling="delayed"), shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_that_begins_inside_of_a_tile_takes_the_bytes_that_a_backend_makes_of_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "_agree", lambda *_: None)  # there is one rank here
    group = Group("tp", (0, 1, 2, 3), 0)
    for start, size in ((0, 172), (172, 172), (344, 172), (516, 172), (96, 32)):
        cut, lead = Cut(start, size, 4 * size, group), start % 128
        for dim, shape in ((0, (size, 256)), (1, (256, size))):
            leads = (lead, 0) if dim == 0 else (0, lead)
            assert planned(backend, Recipe(), shape, leads) == made(backend, Recipe(), shape, (dim, cut)), (start, dim)


def test_the_reference_keeps_one_copy_in_float64_for_both_directions_and_the_others_two_bytes_an_element() -> None:
    elements = 4096 * 4096
    for recipe in (Recipe(), Recipe(scaling="delayed")):
        for backend, each in (("reference", 9), ("torch", 2), ("triton", 2), ("te", 2)):
            assert copies_of(backend, recipe, (4096, 4096)).both == pytest.approx(each * elements, rel=1e-3)


def test_of_transformer_engine_what_its_own_tensor_holds_is_counted() -> None:
    rows, columns = 300, 200
    holds = {
        "_rowwise_data": torch.empty(rows, columns, dtype=torch.uint8),
        "_rowwise_scale_inv": torch.empty(3, 4),
        "_columnwise_data": torch.empty(columns, rows, dtype=torch.uint8),
        "_columnwise_scale_inv": torch.empty(2, 4),
        "_quantizer": None,
    }
    operand = TeOperand(torch.empty(rows, columns), torch.ones(()), (128, 128), tensor=SimpleNamespace(**holds))
    cache = WeightCache(True, (operand, operand.t()))
    assert cache.nbytes == copies_of("te", Recipe(), (rows, columns)).both


def test_what_one_copy_in_float64_does_for_both_directions_is_what_two_did() -> None:
    """Bit for bit: the transposed of the values, and the values of the transposed."""
    weight = torch.randn(200, 300)
    operand = ReferenceBackend().quantize(weight, (128, 128), "e4m3", False)
    assert torch.equal(operand.t().dequantized(), operand.dequantized().t())
    kept = Operand(operand.data, operand.scale_inv, operand.tile, kept={})
    other = ReferenceBackend().quantize(torch.randn(16, 200), (1, 128), "e4m3", False)
    products = [ReferenceBackend().multiply(other, one, torch.float64) for one in (kept.t(), operand.t())]
    assert torch.equal(*products)
    assert list(kept.kept or {}) == ["values"]


def test_each_tensor_parallel_rank_has_its_own_shards_and_layers_that_are_kept_have_none() -> None:
    layers = {
        "model.layers.0.mlp.up_proj": (688, 256),
        "model.layers.0.mlp.down_proj": (256, 688),
        "model.layers.1.mlp.up_proj": (688, 256),
        "lm_head": (512, 256),
    }
    first, second = copies_of_ranks("reference", Recipe(keep=("layers.1",)), layers, 2)
    assert set(first.layers) == set(second.layers) == {0}
    tiles = 3 * 2 * 4  # of 128 rows (or columns), which begin at row 0 or at row 256
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    assert list(first.layers[0]) == [up, down]
    assert first.kept([0, 1], [up, down]) == first.most_in([0, 1], [], lambda copies: copies.both) == 0
    assert first.kept([0], [up]) == first.most_in([0, 1], [down], lambda copies: copies.both) > 0
    assert first.kept([0, 1]) == 2 * (9 * 344 * 256 + tiles)
    assert second.kept([0]) == 2 * (9 * (88 + 344) * 256 + 4 * 2 * 4)

"""FP8 on a GPU: bytes of the quantiser, the three products of every backend that runs there, and a model's losses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from parallax.mesh import Layout, Mesh
from parallax.precision import quantize_tiles
from parallax.precision.backends.choose import candidates
from parallax.precision.backends.reference import ReferenceBackend
from parallax.precision.options import Fp8Options
from parallax.precision.products import Products
from parallax.precision.recipe import Recipe
from tests.distributed.training import SMALL, Case, train
from tests.kernels.cases import random

pytest.importorskip("triton", reason="needs triton: pip install triton")

from parallax.kernels.adamw import kernel as adamw
from parallax.kernels.adamw import reference as adamw_reference
from parallax.kernels.fp8_quantize import kernel as fp8_quantize
from parallax.kernels.fp8_quantize import reference as fp8_quantize_reference

RECIPES = [Recipe(), Recipe(power_of_two_scales=True), Recipe(fp8_format="hybrid")]


def spread(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (random(rows, columns) * torch.exp(2 * random(rows, columns, seed=1))).to(dtype).cuda()


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (130, 300), (4099, 4096), (515, 14336)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_quantiser_gives_the_bytes_of_the_definition(
    rows: int, columns: int, dtype: torch.dtype, fp8_format: str, power_of_two: bool
) -> None:
    x = spread(rows, columns, dtype)
    x[0, 0] = torch.inf
    for tile in ((1, 128), (128, 1), (128, 128)):
        q, scale_inv = fp8_quantize.quantize(x, tile, fp8_format, power_of_two)
        on_cpu, scale_on_cpu = quantize_tiles(x.cpu(), tile, fp8_format, power_of_two)
        assert same_bytes(q.cpu(), on_cpu) and torch.equal(scale_inv.cpu(), scale_on_cpu)
    both = fp8_quantize.quantize_both(x, fp8_format, power_of_two)
    expected = fp8_quantize_reference.quantize_both(x, fp8_format, power_of_two)
    for one, right in zip(both, expected, strict=True):
        assert same_bytes(one, right)


def runnable(recipe: Recipe) -> list:
    return [
        one for one in candidates() if one.why_not(recipe, torch.device("cuda")) is None and one.name != "reference"
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=["fp32 scales", "powers of two", "hybrid"])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(512, 768, 1024), (2048, 4096, 1376), (64, 48, 176)])
def test_the_three_products_of_every_backend_are_those_of_the_reference(
    recipe: Recipe, tokens: int, outputs: int, inputs: int
) -> None:
    if not (backends := runnable(recipe)):
        pytest.skip("no backend of a GPU runs this recipe here")
    x, weight, dy = (
        random(*shape, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed, shape in enumerate(((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    )

    def products(backend) -> list[torch.Tensor]:
        layer = Products(recipe, backend)
        for_input, for_weight = layer.gradient(dy, tokens)
        total = torch.zeros(outputs, inputs, device="cuda")
        layer.wgrad(for_weight, layer.input_for_wgrad(x, tokens))(total)
        input = layer.input(x, record=False)
        return [layer.fprop(input, weight, torch.float32, False), layer.dgrad(for_input, weight, torch.float32), total]

    expected = products(ReferenceBackend())
    for candidate in backends:
        for got, want in zip(products(candidate.make()), expected, strict=True):
            error = ((got - want).norm() / want.norm()).item()
            # Hopper's tensor cores keep about 14 bits of a sum over 128.
            assert error < 1e-3, f"{candidate.name}: {error}"


def test_adamw_equals_its_reference() -> None:
    choices = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for moments, count in itertools.product((torch.float32, torch.bfloat16), (1, 1 << 20, 12345)):
        results = []
        for module in (adamw, adamw_reference):
            state = [random(count, seed=seed, device="cuda") for seed in range(4)]
            state[2:] = [state[2].to(moments), state[3].abs().to(moments)]
            copy = torch.empty(count, dtype=torch.bfloat16, device="cuda")
            steps, clip = torch.tensor(2.0, device="cuda"), torch.tensor(0.5, device="cuda")
            module.adamw_(*state, copy, steps, clip, **choices)
            results.append([*state, copy])
        for one, right in zip(*results, strict=True):
            torch.testing.assert_close(one, right, rtol=2e-6 if one.dtype == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("recipe", ["tile", "delayed"])
def test_a_model_learns_on_a_gpu_as_with_the_reference(recipe: str) -> None:
    model = replace(SMALL, hidden_size=128, intermediate_size=256, head_dim=32)
    mesh = Mesh(Layout(), 0, torch.device("cuda"))
    cases = [
        Case(
            model=model, precision="fp8", seq_len=128, steps=20, fp8=Fp8Options(fp8_recipe=recipe, fp8_backend=backend)
        )
        for backend in ("reference", "auto")
    ]
    reference, fastest = (train(mesh, case) for case in cases)
    assert fastest[-1][0] == pytest.approx(reference[-1][0], rel=0.005)

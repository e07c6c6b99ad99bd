"""The backends where there is no GPU: what they say, and that they hand on operands as their libraries want them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.precision.backends import choose, te, torch_scaled, triton
from parallax.precision.backends.choose import choose_backend
from parallax.precision.backends.reference import ReferenceBackend
from parallax.precision.backends.torch_scaled import TorchBackend
from parallax.precision.operands import Operand, check_pair
from parallax.precision.options import Fp8Options
from parallax.precision.products import Products
from parallax.precision.recipe import Recipe
from tests.distributed.harness import run_layout
from tests.kernels.interpreted.pretend import on_gpu, spy

CPU, GPU = torch.device("cpu"), torch.device("cuda")
REFERENCE = ReferenceBackend()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_auto_takes_the_reference_on_a_cpu_and_says_why() -> None:
    choice = choose_backend(Fp8Options(), CPU)
    assert choice.backend.name == "reference"
    for name in ("te", "torch", "triton"):
        assert f"{name}: needs an NVIDIA GPU, and this run is on cpu" in choice.reason


@pytest.mark.parametrize("name", ["te", "torch", "triton"])
def test_a_backend_that_cannot_run_is_an_error_that_says_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_backend(Fp8Options(fp8_backend=name), CPU)
    assert f"--fp8-backend {name}: needs an NVIDIA GPU, and this run is on cpu" in error.value.problems[0]
    assert "use --fp8-backend auto" in error.value.problems[0]


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    ("capability", "cuda", "recipe", "runs"),
    [
        ((9, 0), "12.9", "tile", ["torch", "triton"]),
        ((9, 0), "12.8", "tile", ["triton"]),
        ((10, 0), "13.0", "tile", ["triton"]),
        ((8, 9), "12.9", "tile", []),
        ((8, 9), "12.9", "delayed", ["torch"]),
        ((8, 0), "12.9", "delayed", []),
    ],
)
def test_what_a_gpu_can_do_decides(
    capability: tuple[int, int], cuda: str, recipe: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, capability, cuda)
    pytest.importorskip("triton")
    can = [
        name
        for name, module in (("torch", torch_scaled), ("triton", triton))
        if module.why_not(Recipe(scaling=recipe), GPU) is None
    ]
    assert can == runs
    assert choose_backend(Fp8Options(fp8_recipe=recipe), GPU).backend.name == (runs or ["reference"])[0]


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_shares_that_a_gpu_would_refuse_are_refused_on_every_backend(name: str) -> None:
    layers = {
        "model.layers.0.mlp.up_proj": (688, 256),
        "model.layers.0.mlp.down_proj": (256, 688),
        "lm_head": (100, 256),
    }
    delayed = Fp8Options(fp8_recipe="delayed", fp8_backend=name)
    for device in (CPU, GPU):
        with pytest.raises(
            ConfigError, match=r"multiples of 16, and --tp 2 makes them 344 .* --fp8-keep up_proj down_proj"
        ):
            choose_backend(delayed, device, layers, tp=2)
    assert choose_backend(delayed, CPU, layers, tp=1).backend.name == "reference"
    assert choose_backend(replace(delayed, fp8_keep=("mlp",)), CPU, layers, tp=2).backend.name == "reference"
    assert choose_backend(Fp8Options(fp8_backend=name), CPU, layers, tp=2).backend.name == "reference"


def test_transformer_engine_takes_shares_of_whole_tiles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "why_not", lambda recipe, device: None)
    layers = {"model.layers.0.self_attn.k_proj": (128, 256), "model.layers.0.mlp.up_proj": (768, 256)}
    assert choose_backend(Fp8Options(fp8_keep=("k_proj",)), GPU, layers, tp=2).backend.name == "te"
    assert choose_backend(Fp8Options(fp8_recipe="delayed"), GPU, layers, tp=2).backend.name == "te"
    with pytest.raises(ConfigError, match="needs tensor-parallel shares of whole tiles of 128"):
        choose_backend(Fp8Options(fp8_backend="te"), GPU, layers, tp=2)


def test_kernels_off_leaves_our_backend_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    on(monkeypatch, (10, 0), "13.0")
    assert choose_backend(Fp8Options(), GPU).backend.name == "triton"
    monkeypatch.setenv("PARALLAX_KERNELS", "off")
    choice = choose_backend(Fp8Options(), GPU)
    assert choice.backend.name == "reference"
    assert "triton: computes with our own kernels, which --kernels off turns off" in choice.reason
    for device in (CPU, GPU):
        with pytest.raises(
            ConfigError, match="--fp8-backend triton: computes with our own kernels, which --kernels off"
        ):
            choose_backend(Fp8Options(fp8_backend="triton"), device)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_torch_quantises_with_our_kernel_only_where_kernels_are_on(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from parallax.kernels.fp8_quantize import kernel

    monkeypatch.setenv("PARALLAX_KERNELS", kernels)
    calls = [spy(monkeypatch, kernel, name) for name in ("quantize", "quantize_both")]
    x = on_gpu(random(128, 128))
    for call, backend_quantises in zip(
        calls,
        (
            lambda backend: backend.quantize(x, (128, 128), "e4m3", False),
            lambda backend: backend.quantize_both(x, "e4m3", False),
        ),
        strict=True,
    ):
        with suppress(ValueError):  # a compiled kernel refuses a tensor that only pretends to be on a GPU
            backend_quantises(TorchBackend())
        assert bool(call) == (kernels == "on")


def test_transformer_engine_is_judged_by_recipe_gpu_and_cuda() -> None:
    tile, delayed = Recipe(), Recipe(scaling="delayed", fp8_format="hybrid")
    assert te._why_not_on(delayed, (8, 9), "12.4") is None
    assert te._why_not_on(tile, (9, 0), "12.9") is None
    assert "CUDA 12.9" in str(te._why_not_on(tile, (9, 0), "12.8"))
    assert "powers of two" in str(te._why_not_on(tile, (10, 0), "13.0"))
    assert te._why_not_on(Recipe(power_of_two_scales=True), (10, 0), "13.0") is None
    assert "e4m3 only" in str(te._why_not_on(Recipe(fp8_format="hybrid"), (9, 0), "12.9"))


@pytest.mark.parametrize(
    "broken", ["raise RuntimeError('cudnn shared object not found.')", "raise OSError('no libcudart')"]
)
def test_a_transformer_engine_that_does_not_import_is_found_without_importing_it(broken: str, tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(broken)
    (tmp_path / "transformer_engine-2.20.2.dist-info").mkdir()
    (tmp_path / "transformer_engine-2.20.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n"
    )
    program = """
import sys, torch
from parallax.precision.backends import te
from parallax.precision.recipe import Recipe
print(te.why_not(Recipe(), torch.device("cpu")), "transformer_engine" in sys.modules, sep="; ")
torch.cuda.get_device_capability, torch.version.cuda = (lambda device: (9, 0)), "12.9"
print(te.why_not(Recipe(), torch.device("cuda")))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    on_cpu, on_gpu = run.stdout.splitlines()
    assert on_cpu == "needs an NVIDIA GPU, and this run is on cpu; False"
    assert on_gpu.startswith(
        "cannot be imported (RuntimeError" if "Runtime" in broken else "cannot be imported (OSError"
    )


def test_a_folder_of_that_name_is_no_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "which is not installed" in str(te.why_not(Recipe(), GPU))


def _agreed(mesh: Mesh, trouble: str) -> str:
    """Return the backend that ranks agree on, or what they say where rank 1 has a machine of its own."""
    if mesh.rank == 1 and trouble == "none here":
        te_only = [choose.Candidate("te", lambda recipe, device: "needs what rank 1 lacks", ReferenceBackend)]
        choose.candidates = lambda: te_only  # type: ignore[assignment]
    elif mesh.rank == 1 and trouble == "another":
        choose.candidates = lambda: [choose.Candidate("torch", lambda recipe, device: None, TorchBackend)]
    try:
        return choose.agree_on_backend(Fp8Options(), mesh).backend.name
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("", "reference"),
        (
            "none here",
            "--fp8-backend te: needs what rank 1 lacks; use --fp8-backend auto, which takes the best that runs here",
        ),
        (
            "another",
            "--fp8-backend auto is torch on rank 1 and reference on rank 0; use the same software on GPUs of one kind",
        ),
    ],
)
def test_ranks_compute_with_one_backend_or_all_say_why_not(trouble: str, said: str) -> None:
    results = run_layout(Layout(dp=2), _agreed, trouble)
    assert results[0] == results[1] and results[0].startswith(said)


EARLY = """
import sys
from parallax import job
from parallax.resolve import parse_pretrain
def prepare(config):
    print("prepared;", "torch" in sys.modules)
    raise SystemExit(0)
job.run(parse_pretrain(sys.argv[1:]), prepare, None)
"""


def _start(words: str, folder: Path) -> tuple[int, str, str]:
    words = f"--layers 1 --hidden 32 --heads 2 --kv-heads 2 --ffn 32 --seq-len 16 --steps 1 --out {folder} {words}"
    command = [sys.executable, "-c", EARLY, *words.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return run.returncode, run.stdout, run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_backend_that_cannot_run_is_refused_before_the_data_is_prepared(tmp_path: Path) -> None:
    status, said, problems = _start("--precision fp8 --fp8-backend te", tmp_path / "out")
    assert (status, said) == (2, "")
    assert "--fp8-backend te: needs an NVIDIA GPU, and this run is on cpu; use --fp8-backend auto" in problems
    assert len(problems.splitlines()) == 1
    assert _start("--precision fp8", tmp_path / "out")[:2] == (0, "prepared; True\n")
    assert _start("--precision bf16", tmp_path / "out")[:2] == (0, "prepared; False\n")  # torch can wait


def products(backend: Any, tokens: int, outputs: int, inputs: int, length: int, recipe: Recipe) -> list[torch.Tensor]:
    """Return the three products of one layer."""
    layer = Products(recipe, backend)
    x, weight, dy = random(tokens, inputs), random(outputs, inputs, seed=1), random(tokens, outputs, seed=2)
    for_input, for_weight = layer.gradient(dy, length)
    total = torch.ones(outputs, inputs)
    layer.wgrad(for_weight, layer.input_for_wgrad(x, length))(total)
    return [
        layer.fprop(layer.input(x, record=False), weight, torch.float32, record=False),
        layer.dgrad(for_input, weight, torch.float32),
        total,
    ]


def cublas(
    a: torch.Tensor, b: torch.Tensor, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, output_dtype, use_fast_accum
) -> torch.Tensor:
    """What torch.nn.functional.scaled_mm does by tiles on a GPU, and refuses, by cuBLAS's documentation."""
    kinds = F.ScalingType
    assert not use_fast_accum and (scale_recipe_a, scale_recipe_b) != (kinds.BlockWise128x128,) * 2
    assert a.stride(1) == 1 and b.stride(0) == 1, "k must lie along memory in both operands"
    assert a.shape[1] % 16 == 0 and a.shape[0] % 16 == 0 and b.shape[1] % 16 == 0

    def wide(q: torch.Tensor, scale: torch.Tensor, kind: Any) -> torch.Tensor:
        rows, k = q.shape
        steps = -(-k // 128)
        if kind == kinds.BlockWise1x128:
            assert scale.shape == (rows, steps) and scale.stride(0) == 1, "rows must lie along memory"
            factors = scale
        else:
            assert kind == kinds.BlockWise128x128
            assert scale.shape == (-(-steps // 4) * 4, -(-rows // 128)) and scale.stride(0) == 1
            factors = scale.t()[:, :steps].repeat_interleave(128, 0)[:rows]
        return q.float() * factors.repeat_interleave(128, 1)[:, :k]

    return (wide(a, scale_a, scale_recipe_a) @ wide(b.t(), scale_b, scale_recipe_b).t()).to(output_dtype)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this torch has no torch.nn.functional.scaled_mm")
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "length"), [(256, 256, 384, 128), (64, 48, 688, 16), (48, 304, 80, 48)]
)
def test_torch_is_handed_operands_and_scales_as_cublas_wants_them(
    tokens: int, outputs: int, inputs: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", cublas)
    sizes = tokens, outputs, inputs, length
    for recipe in (Recipe(), Recipe(fp8_format="hybrid", power_of_two_scales=True)):
        expected = products(REFERENCE, *sizes, recipe)
        for got, want in zip(products(TorchBackend(), *sizes, recipe), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this torch has no torch.nn.functional.scaled_mm")
def test_torch_multiplies_operands_with_one_scale_each() -> None:
    backend = TorchBackend()
    scale = torch.tensor(32.0)
    a, b = backend.cast(random(40, 80), scale, "e5m2"), backend.cast(random(48, 80, seed=1), scale / 2, "e4m3")
    got, want = (one.multiply(a, b, torch.float32) for one in (backend, REFERENCE))  # on a CPU torch does this itself
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    total = torch.ones(40, 48)
    backend.multiply_add_(total, a, b)
    torch.testing.assert_close(total, want + 1, rtol=1e-5, atol=1e-5)


def test_a_pair_that_no_gpu_multiplies_is_refused_on_every_backend() -> None:
    x = random(128, 128)
    row, square = (REFERENCE.quantize(x, tile, "e4m3", False) for tile in ((1, 128), (128, 128)))
    check_pair(row, square)
    with pytest.raises(ValueError, match=r"tiles of \(128, 128\) and \(128, 128\) cannot be multiplied"):
        check_pair(square, square.t())
    five = REFERENCE.quantize(x, (1, 128), "e5m2", False)
    with pytest.raises(ValueError, match="two operands in e5m2"):
        check_pair(five, five)
    with pytest.raises(ValueError, match="quantise both or neither"):
        check_pair(row, Operand(x))
    with pytest.raises(ValueError, match="not summed over dims of one size"):
        check_pair(row, REFERENCE.quantize(random(128, 64), (128, 128), "e4m3", False))

"""What we use of Transformer Engine, held against its own Python source, for several versions and without a GPU.

Its wheel of Python source is small and imports once its C++ part has stand-ins (transformer_engine_stub.py). What its kernels
compute is seen on a GPU only: tests/gpu/test_fp8_on_gpu.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch

from parallax.precision.backends import te
from parallax.precision.operands import check_pair

VERSIONS = ["2.9.0", "2.14.1", "2.20.2"]


@cache
def unpacked(version: str, folder: Path) -> Path | None:
    """Return the folder of the package's source; None if it cannot be had here."""
    asked = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
    run = subprocess.run([*asked, f"transformer-engine=={version}"], capture_output=True, text=True, timeout=100)
    wheels = list(folder.glob(f"transformer_engine-{version}-*.whl"))
    if run.returncode or not wheels:
        return None
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder / version)
    return folder / version


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_and_keyword_that_we_use_exists(version: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = unpacked(version, tmp_path_factory.mktemp("te"))
    if source is None:
        pytest.skip(f"pip cannot download transformer-engine {version} here")
    stub = Path(__file__).with_name("transformer_engine_stub.py")
    run = subprocess.run([sys.executable, str(stub), str(source)], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    quantizer = {"fp8_dtype", "rowwise", "columnwise"}
    assert quantizer | {"amax_epsilon", "force_pow_2_scales", "block_scaling_dim"} <= found["block"].keys()
    assert quantizer | {"scale", "amax"} <= found["tensor"].keys()
    gemm = {"A", "B", "layout", "out", "out_dtype", "accumulate", "use_split_accumulator"}
    assert gemm <= found["gemm"].keys()
    assert found["layouts"] == ["TN", "NN", "NT"]
    # What we ask for is what the quantiser holds: a recipe's use_f32_scales, in comparison, would change nothing.
    assert found["held"] == [False, 0.0, 128] and found["dim"] == 1 and found["callable"]


class Recorder:
    """Stands in for the package: keeps what its functions are called with, and computes plainly."""

    def __init__(self) -> None:
        self.calls: list[dict] = []
        self.tex = type("tex", (), {"DType": type("DType", (), {"kFloat8E4M3": 4, "kFloat8E5M2": 5})})
        self.workspace: dict = {}

    def block_quantizer(self, **how):
        self.calls.append(how)
        return lambda x: x.float()

    tensor_quantizer = block_quantizer

    def general_gemm(self, A, B, layout, out_dtype, out=None, accumulate=False, use_split_accumulator=False):
        # BLAS counts columns first: a row-major matrix is the transposed one there.
        a, b = A.t(), B.t()
        product = ((a.t() if layout[0] == "T" else a) @ (b.t() if layout[1] == "T" else b)).t()
        self.calls.append({"layout": layout, "split": use_split_accumulator, "accumulate": accumulate})
        return ((product.to(out_dtype) if out is None else out.add_(product)),)


def test_the_three_products_are_asked_for_in_the_layouts_of_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder()
    monkeypatch.setattr(te, "_engine", lambda: engine)
    backend = te.TransformerEngineBackend()
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((256, 384), (128, 384), (256, 128)))
    input, weight = backend.quantize(x, (1, 128), "e4m3", False), backend.quantize(w, (128, 128), "e4m3", False)
    by_rows, by_columns = backend.quantize_both(dy, "e4m3", False)
    inputs_by_columns = backend.quantize(x, (128, 1), "e4m3", False)
    asked = [(call["rowwise"], call["columnwise"], call["block_scaling_dim"]) for call in engine.calls]
    assert asked == [(True, False, 1), (True, True, 2), (True, True, 1), (False, True, 1)]
    engine.calls.clear()

    for a, b in ((input, weight), (by_rows, weight.t()), (by_columns.t(), inputs_by_columns.t())):
        check_pair(a, b)
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(backend.multiply(input, weight, torch.float32), x @ w.t(), **close)
    torch.testing.assert_close(backend.multiply(by_rows, weight.t(), torch.float32), dy @ w, **close)
    total = torch.ones(128, 384)
    backend.multiply_add_(total, by_columns.t(), inputs_by_columns.t())
    torch.testing.assert_close(total, dy.t() @ x + 1, **close)
    assert [call["layout"] for call in engine.calls] == ["TN", "NN", "NT"]
    assert [call["accumulate"] for call in engine.calls] == [False, False, True]
    assert all(call["split"] for call in engine.calls)


def test_one_scale_for_a_tensor_serves_all_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder()
    monkeypatch.setattr(te, "_engine", lambda: engine)
    backend = te.TransformerEngineBackend()
    scale = torch.tensor(3.0)
    gradient, input = backend.cast(torch.randn(32, 16), scale, "e5m2"), backend.cast(torch.randn(32, 48), scale, "e4m3")
    assert [call["fp8_dtype"] for call in engine.calls] == [5, 4]
    assert all(call["rowwise"] and call["columnwise"] and call["scale"].item() == 3.0 for call in engine.calls)
    check_pair(gradient.t(), input.t())
    assert backend.multiply(gradient.t(), input.t(), torch.float32).shape == (16, 48)

"""How a product reaches the main gradient, and how apex is found."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from parallax.tensor_parallel import accumulate
from tests.kernels.interpreted.pretend import on_gpu


@pytest.fixture(autouse=True)
def forget() -> None:
    accumulate.apex_extension.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_product_is_added(dtype: torch.dtype) -> None:
    gradient, input = torch.randn(6, 3).to(dtype), torch.randn(6, 4).to(dtype)
    main_grad = torch.ones(3, 4, dtype=torch.promote_types(dtype, torch.float32))
    accumulate.add_product_(main_grad, gradient, input)
    torch.testing.assert_close(main_grad.double() - 1, gradient.double().t() @ input.double(), rtol=1e-2, atol=2e-2)


def test_apex_is_used_on_a_gpu_where_its_extension_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = types.ModuleType(accumulate.EXTENSION)
    module.wgrad_gemm_accum_fp32 = lambda input, gradient, total: calls.append(
        (input.shape, gradient.shape, total.shape)
    )
    monkeypatch.setattr(accumulate, "apex_extension", lambda: module)
    main_grad = on_gpu(torch.zeros(3, 4))
    accumulate.add_product_(main_grad, torch.ones(6, 3).bfloat16(), torch.ones(6, 4).bfloat16())
    assert calls == [((6, 4), (6, 3), (3, 4))]


def test_the_other_apex_and_a_broken_extension_are_no_apex(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text(
        "from pyramid.session import UnencryptedCookieSessionFactoryConfig\n"
    )
    program = "from parallax.tensor_parallel.accumulate import apex_extension; print(apex_extension())"

    def found() -> str:
        run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert found() == "None"
    (tmp_path / f"{accumulate.EXTENSION}.py").write_text("raise ImportError('undefined symbol')\n")
    assert found() == "None"

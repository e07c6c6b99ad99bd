"""What is said where a kernel cannot run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

OPERATORS = ["rms_norm", "swiglu", "cross_entropy", "fp8_quantize", "fp8_gemm", "adamw"]


def test_without_triton_a_kernel_names_the_extra_to_install_and_the_rest_imports() -> None:
    program = f"""
import importlib, sys
sys.modules["triton"] = None  # as if it were not installed
import parallax.layers
for operator in {OPERATORS}:
    importlib.import_module(f"parallax.kernels.{{operator}}.reference")
    try:
        importlib.import_module(f"parallax.kernels.{{operator}}.kernel")
    except ImportError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    sentence = "Parallax's GPU kernels need triton, which is not installed; install it with: pip install triton"
    assert run.stdout.splitlines() == [sentence] * len(OPERATORS)


def test_a_compiled_kernel_refuses_a_tensor_that_is_not_on_a_gpu() -> None:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.skip("TRITON_INTERPRET is set, so kernels do run on CPU tensors")
    from parallax.kernels.swiglu.kernel import swiglu_forward

    with pytest.raises(ValueError, match=r"runs on CUDA tensors, not on cpu; .* TRITON_INTERPRET=1"):
        swiglu_forward(torch.ones(4), torch.ones(4))


def test_one_flag_turns_all_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from parallax.kernels.table import KERNELS, has_kernel
    from tests.kernels.interpreted.pretend import on_gpu

    assert set(KERNELS) == set(OPERATORS)
    for operator, (_, dtypes) in KERNELS.items():
        here = torch.ones(2).to(dtypes[0])
        assert has_kernel(operator, on_gpu(here)) and not has_kernel(operator, here)
        assert not has_kernel(operator, on_gpu(here.double()))
        with monkeypatch.context() as patch:
            patch.setenv("PARALLAX_KERNELS", "off")
            assert not has_kernel(operator, on_gpu(here))


@pytest.mark.parametrize("value", ["0", "Off", "", "no"])
def test_another_value_of_the_environment_variable_than_on_and_off_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parallax.kernels.table import kernels_are_on

    monkeypatch.setenv("PARALLAX_KERNELS", value)
    with pytest.raises(ValueError, match=f"PARALLAX_KERNELS={value} is neither on nor off"):
        kernels_are_on()

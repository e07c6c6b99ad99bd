"""Add the product that is a weight's gradient to the fp32 main gradient: one fused operation where there is one.

    NVIDIA apex    wgrad_gemm_accum_fp32, of its extension module fused_weight_gradient_mlp_cuda
    torch          addmm of bf16 factors with an fp32 result, on CUDA
    otherwise      the product in the factors' type, then an addition

apex is found by its extension modules: the `apex` of PyPI is another project, and a build of NVIDIA's without extensions imports
and then fails when it is used. torch's own does the same in one pass, so apex is used where it is there, and not asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

EXTENSION = "fused_weight_gradient_mlp_cuda"


@cache
def apex_extension() -> Any:
    """Return apex's extension module, None where it is not, or cannot be loaded."""
    if importlib.util.find_spec(EXTENSION) is None:
        return None
    try:
        return importlib.import_module(EXTENSION)
    except (ImportError, OSError):  # built for another torch or CUDA
        return None


def add_product_(main_grad: torch.Tensor, grad_output: torch.Tensor, input: torch.Tensor) -> None:
    """Add `grad_output^T @ input`, of `[tokens, out]` and `[tokens, in]`, to `main_grad` `[out, in]` in place."""
    if grad_output.dtype == input.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), input)
    elif not main_grad.is_cuda or main_grad.dtype != torch.float32:
        # The product of one micro-batch is rounded to the layers' type, sums over micro-batches are not.
        main_grad.add_(grad_output.t() @ input)
    elif (apex := apex_extension()) is not None:
        apex.wgrad_gemm_accum_fp32(input.contiguous(), grad_output.contiguous(), main_grad)
    else:
        torch.addmm(main_grad, grad_output.t(), input, out_dtype=torch.float32, out=main_grad)

"""Which operators have a kernel, for which devices and types; the one place that decides whether a kernel runs.

    if has_kernel("rms_norm", input): ...

PARALLAX_KERNELS=off in the environment turns all of them off: the layers then compute with PyTorch's operators on a GPU too, and
FP8 products with another backend than `triton`. It is for programs of one's own: a run of the command line sets it to what its
`--kernels` says. No triton is imported here.
"""

from __future__ import annotations

import os

import torch

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# {operator: (the kinds of device, the types of its input)}
KERNELS: dict[str, tuple[tuple[str, ...], tuple[torch.dtype, ...]]] = {
    "rms_norm": (("cuda",), _FLOATING),
    "swiglu": (("cuda",), _FLOATING),
    "cross_entropy": (("cuda",), _FLOATING),
    "adamw": (("cuda",), (torch.float32,)),
    "fp8_quantize": (("cuda",), _FLOATING),
    "fp8_gemm": (("cuda",), _FP8),
}


def kernels_are_on() -> bool:
    """Return what PARALLAX_KERNELS says, on where it is not set; raises ValueError for another value than on and off."""
    said = os.environ.get("PARALLAX_KERNELS", "on")
    if said not in ("on", "off"):
        raise ValueError(
            f"PARALLAX_KERNELS={said} is neither on nor off; set it to one of them, or leave it out, which is on"
        )
    return said == "on"


def has_kernel(operator: str, input: torch.Tensor) -> bool:
    """Whether a kernel computes `operator` on this input."""
    devices, dtypes = KERNELS[operator]
    device = "cuda" if input.is_cuda else input.device.type
    return device in devices and input.dtype in dtypes and kernels_are_on()

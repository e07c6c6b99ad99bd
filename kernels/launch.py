"""What the launchers of all kernels share: triton itself, the checks of their arguments, and where a kernel may run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise ImportError(
        "Parallax's GPU kernels need triton, which is not installed; install it with: pip install triton"
    ) from error

__all__ = ["FLOATING", "OPTIONS", "check", "multiprocessors", "on_device_of", "tl", "triton"]

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
# Of every launch. A multiplication and an addition become one instruction that rounds once: triton's default up to 3.9, which
# warns that it will change.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}


def check(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    *,
    shape: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless the tensor is contiguous, of one of the dtypes, and of the shape and on the device if given."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; this kernel takes {', '.join(map(str, dtypes))}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, but the other arguments make it {list(shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but the other arguments are on {device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous (shape {list(tensor.shape)}, strides {list(tensor.stride())}); "
            f"pass {name}.contiguous()"
        )


def on_device_of(tensor: torch.Tensor, kernel: Any) -> AbstractContextManager[object]:
    """Return the context to launch the kernel in: triton launches on the current GPU, wherever its arguments are.

    Raises ValueError for a tensor that is not on a GPU, unless triton interprets the kernel.
    """
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    if isinstance(kernel, triton.JITFunction):
        raise ValueError(
            f"a compiled kernel runs on CUDA tensors, not on {tensor.device}; move the tensors to a GPU, "
            "or set TRITON_INTERPRET=1 before python starts, to interpret the kernel on CPU tensors"
        )
    return nullcontext()


def multiprocessors(device: torch.device) -> int:
    """Return how many streaming multiprocessors the GPU has; 2 where triton interprets the kernel."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2

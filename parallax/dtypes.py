"""The dtypes that ranks can name to each other by number: a dtype's code is its place here. Appended to, never reordered."""

from __future__ import annotations

import torch

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

"""Packed rows through the GPU's own attention against the same rows on the CPU, document by document, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallax.models.packed_rows import PackedRows

DOCUMENTS = torch.tensor([[0] * 100 + [1] * 27 + [2] * 1, [0] * 64 + [1] * 64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_inside_documents_equals_the_cpus(kv_heads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 128, heads, 64) for heads in (8, kv_heads, kv_heads, 8)]
    *inputs, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        rows = PackedRows.from_batch({"documents": DOCUMENTS.to(device)})
        assert rows is not None
        heads = [tensor.to(device, kind).requires_grad_() for tensor in inputs]
        output = rows.attend(*heads, nn.Module())
        output.backward(gradient.to(device, kind))
        results.append([tensor.detach().cpu().double() for tensor in (output, *(head.grad for head in heads))])
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

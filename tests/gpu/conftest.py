"""These tests need a GPU and say so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)

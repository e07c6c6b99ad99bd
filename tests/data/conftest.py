from __future__ import annotations

from pathlib import Path

import pytest

from parallax.data.tokenizers import Tokenizer, load_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache folder of its own, which does not exist yet."""
    folder = tmp_path / "parallax-cache"
    monkeypatch.setenv("PARALLAX_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def default_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Train the default tokenizer once for all test processes, which ask for it at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLAX_CACHE", str(tmp_path_factory.getbasetemp().parent / "parallax-test-cache"))
        return load_tokenizer(None)

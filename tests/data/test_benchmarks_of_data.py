"""The benchmarks of data compare what they say: contestants write the same tokens. Their figures are not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data_build import compete, write_corpus


@pytest.mark.filterwarnings("ignore")
def test_the_contestants_write_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install -e '.[megatron]'")
    write_corpus(tmp_path / "corpus.jsonl", 1 << 18)
    assert 1 << 18 <= (tmp_path / "corpus.jsonl").stat().st_size < 1 << 19
    figures = compete(tmp_path / "corpus.jsonl", "bytes", 2, 1)  # says so if they differ
    assert {"parallax", "megatron-core"} <= figures.keys()

"""The real megatron-core reads what we write and writes what we read, byte for byte; install the extra `megatron` for it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from parallax.data import IndexedDataset, IndexedWriter
from parallax.data.indexed.layout import index_dtype

NAMES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]
DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[7] * 100]]


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed: pip install -e '.[megatron]'"
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_both_write_the_same_bytes_and_read_each_other(tmp_path: Path, theirs: ModuleType, name: str) -> None:
    import torch

    dtype = np.dtype(name).type
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for document in DOCUMENTS:
            for sequence in document:
                builder.add_item(torch.tensor(sequence))
                writer.add_sequence(sequence)
            builder.end_document()
            writer.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    by_them = theirs.IndexedDataset(str(tmp_path / "ours"))
    by_us = IndexedDataset(tmp_path / "theirs")
    assert len(by_them) == len(by_us) == 4
    assert [by_them[i].tolist() for i in range(4)] == [by_us[i].tolist() for i in range(4)]
    assert by_them.document_indices.tolist() == by_us.document_indices.tolist() == [0, 1, 3, 4]
    assert by_them.get(3, offset=10, length=5).tolist() == by_us.get(3, offset=10, length=5).tolist()
    assert by_them[0].dtype == by_us[0].dtype


@pytest.mark.parametrize("vocab_size", [256, 65499, 65500, 65536, 200_000])
def test_a_vocabulary_is_given_the_type_that_they_give_it(theirs: ModuleType, vocab_size: int) -> None:
    assert index_dtype(vocab_size) == np.dtype(theirs.DType.optimal_dtype(vocab_size))

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallax.data.dataset import Borders, TokenDataset
from parallax.data.loader import BatchLoader
from parallax.errors import ConfigError
from tests.data.streams import stream_of


@pytest.fixture
def dataset() -> TokenDataset:
    return TokenDataset(stream_of(1000), [(0, 1000)], seq_len=9)  # 111 samples


def first_tokens(loaders: list[BatchLoader], step: int) -> list[int]:
    """Return the first token of every sample of a step: it tells which sample it is."""
    return [int(t) for loader in loaders for batch in loader.micro_batches(step) for t in batch["input_ids"][:, 0]]


def test_a_micro_batch_holds_inputs_and_labels_shifted_by_one(dataset: TokenDataset) -> None:
    batches = BatchLoader(dataset, 0, 8, 2).micro_batches(0)
    assert len(batches) == 4
    for batch in batches:
        assert set(batch) == {"input_ids", "labels"}
        for tensor in batch.values():
            assert tensor.shape == (2, 9) and tensor.dtype == torch.int64 and tensor.is_contiguous()
        assert torch.equal(batch["labels"], batch["input_ids"] + 1)


def test_every_layout_trains_on_the_same_samples_in_each_step(dataset: TokenDataset) -> None:
    single = BatchLoader(dataset, 5, 24, 1)
    for step in (0, 3, 4, 5):  # step 4 has samples of two epochs
        reference = first_tokens([single], step)
        for dp in (1, 2, 3, 4):
            for micro in (1, 2):
                loaders = [BatchLoader(dataset, 5, 24, micro, rank, dp) for rank in range(dp)]
                assert sorted(first_tokens(loaders, step)) == sorted(reference)


def test_positions_are_dealt_to_the_ranks_micro_batch_by_micro_batch(dataset: TokenDataset) -> None:
    for rank, positions in enumerate(([8, 9, 12, 13], [10, 11, 14, 15])):
        loader = BatchLoader(dataset, 0, 8, 2, rank, 2, shuffle=False)
        assert first_tokens([loader], 1) == [9 * p for p in positions]


def test_the_first_epoch_does_not_depend_on_what_is_asked_for_after_it(dataset: TokenDataset) -> None:
    """Megatron-LM 697, 1002, 1139: each document is seen once before any is repeated, however long the run is."""
    loader = BatchLoader(dataset, 0, 1, 1)
    for step in (5000, 0, 222):
        loader.micro_batches(step)
    seen = [token for step in range(len(dataset)) for token in first_tokens([loader], step)]
    assert sorted(seen) == [9 * i for i in range(111)]
    assert seen == [token for step in range(111) for token in first_tokens([BatchLoader(dataset, 0, 1, 1)], step)]


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_no_rank_runs_out_of_data_before_the_others(samples: int) -> None:
    """PyTorch 141069: a rank whose data ends first lets the others wait for ever."""
    dataset = TokenDataset(stream_of(9 * samples + 1), [(0, 9 * samples + 1)], seq_len=9)
    for dp in (1, 2, 3, 4):
        loaders = [BatchLoader(dataset, 0, 12, 1, rank, dp) for rank in range(dp)]
        for step in range(8):
            assert {len(loader.micro_batches(step)) for loader in loaders} == {12 // dp}


def test_asking_again_gives_the_same_and_another_seed_gives_another(dataset: TokenDataset) -> None:
    loader = BatchLoader(dataset, 0, 16, 4)
    first = first_tokens([loader], 7)
    first_tokens([loader], 8)
    assert first_tokens([loader], 7) == first
    assert first_tokens([BatchLoader(dataset, 1, 16, 4)], 7) != first


class Rows:
    """Four rows, each of three arrays."""

    fingerprint = "rows"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        documents = np.full(5, i, dtype=np.int32)
        return {"input_ids": np.arange(5) + i, "labels": np.arange(5) - i, "documents": documents}


def test_rows_are_stacked_array_by_array() -> None:
    (batch,) = BatchLoader(Rows(), 0, 4, 4, shuffle=False).micro_batches(0)
    assert list(batch) == ["input_ids", "labels", "documents"]
    assert batch["documents"].tolist() == [[i] * 5 for i in range(4)] and batch["documents"].dtype == torch.int32
    assert batch["input_ids"][3].tolist() == [3, 4, 5, 6, 7] and batch["labels"][2].tolist() == [-2, -1, 0, 1, 2]


def test_evaluation_counts_no_sample_twice_when_the_data_is_short() -> None:
    short = TokenDataset(stream_of(10), [(0, 10)], seq_len=3)
    loader = BatchLoader(short, 0, 8, 2, shuffle=False)
    labels = [batch["labels"].tolist() for batch in loader.micro_batches(0)]
    nothing = [-100, -100, -100]
    assert labels == [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], nothing], [nothing, nothing], [nothing, nothing]]
    assert loader.steps_per_epoch == 1


def test_a_global_batch_that_cannot_be_dealt_out_is_an_error(dataset: TokenDataset) -> None:
    with pytest.raises(ConfigError, match="--global-batch 10 must be a multiple of --micro-batch 2 times dp=4"):
        BatchLoader(dataset, 0, 10, 2, 0, 4)


def test_what_samples_say_of_their_documents_goes_into_the_batch() -> None:
    data = TokenDataset(stream_of(100, [0, 2, 5, 6]), [(0, 100)], seq_len=9, borders=Borders(True, True))
    (batch,) = BatchLoader(data, 0, 2, 2, shuffle=False).micro_batches(0)
    assert list(batch) == ["input_ids", "labels", "documents", "positions"]
    assert batch["documents"].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 3], [0] * 9]
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0, 0, 1, 2], list(range(9))]
    assert batch["documents"].dtype == torch.int32 and batch["positions"].dtype == torch.int64
    assert batch["labels"].tolist() == [list(range(1, 10)), list(range(10, 19))]


def test_samples_that_are_whole_batches_are_stacked_as_they_are() -> None:
    class Rows:
        fingerprint = "rows"

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> dict[str, np.ndarray]:
            return {"input_ids": np.array([i, i + 1]), "labels": np.array([-100, i])}

    (batch,) = BatchLoader(Rows(), 0, 2, 2, shuffle=False).micro_batches(1)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[2, 3], [3, 4]],
        "labels": [[-100, 2], [-100, 3]],
    }

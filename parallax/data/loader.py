"""Micro-batches of a step, for one data-parallel rank.

    positions of a step, global_batch_size 8, micro_batch_size 1, dp 2:

        0    1    2    3    4    5    6    7
        m0   m0   m1   m1   m2   m2   m3   m3      micro-batch
        d0   d1   d0   d1   d0   d1   d0   d1      data-parallel rank

The step's positions are cut into micro-batches first and dealt to the ranks, so each layout trains on the same samples
in each step. The loader has no state but its order's kept permutation: asking for step s again gives the same tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from parallax.data.blend import BlendedDataset, BlendOrder
from parallax.data.order import DataOrder
from parallax.data.packing import IGNORE_INDEX
from parallax.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Samples(Protocol):
    """A data set whose sample i is int64 `[seq_len + 1]`, or a row: arrays by name, of the same shapes in every row."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> np.ndarray | dict[str, np.ndarray]: ...


class BatchLoader:
    """Gives the micro-batches of any step; see the drawing above.

    Args:
        dataset: where samples come from.
        seed: of the data order.
        global_batch_size: samples per step over all ranks.
        micro_batch_size: samples in one forward pass of a rank.
        dp_rank, dp_size: this rank's place among the data-parallel ranks; the others see other samples.
        shuffle: False reads the data set once, in its own order, as evaluation does: past its end, or past that of a source of a
            blend, there is nothing to predict.
        pin_memory: put the tensors into page-locked memory, from where a GPU can copy them without waiting.

    Raises:
        ConfigError: the global batch cannot be dealt out evenly.
    """

    def __init__(
        self,
        dataset: Samples,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        shuffle: bool = True,
        pin_memory: bool = False,
    ) -> None:
        if global_batch_size % (micro_batch_size * dp_size):
            raise ConfigError(
                f"--global-batch {global_batch_size} must be a multiple of --micro-batch {micro_batch_size} times "
                f"dp={dp_size}."
            )
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        self.dataset = dataset
        self.order: BlendOrder | DataOrder
        if isinstance(dataset, BlendedDataset):
            self.order = BlendOrder(seed, dataset, shuffle)
        else:
            self.order = DataOrder(seed, dataset.fingerprint, len(dataset), shuffle)
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.pin_memory = pin_memory
        self.shuffle = shuffle
        self.num_micro_batches = global_batch_size // (micro_batch_size * dp_size)

    @property
    def steps_per_epoch(self) -> int:
        """How many steps go through the data set once, the last of them perhaps not full."""
        return -(-self.order.num_samples // self.global_batch_size)

    def micro_batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Return this rank's micro-batches of a step, counted from 0.

        Each holds `input_ids` and `labels`, int64 `[micro_batch, seq]`; labels are shifted already: `labels[:, t]` is
        the token after `input_ids[:, t]`. Of rows it holds all that a row has, each `[micro_batch, ...]`.
        """
        return [self._micro_batch(step, m) for m in range(self.num_micro_batches)]

    def _micro_batch(self, step: int, m: int) -> dict[str, torch.Tensor]:
        import torch

        first = step * self.global_batch_size + (m * self.dp_size + self.dp_rank) * self.micro_batch_size
        samples = [self.dataset[int(i)] for i in self.order.samples(first, self.micro_batch_size)]
        rows = [{"window": sample} if isinstance(sample, np.ndarray) else sample for sample in samples]
        arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        if "window" in arrays:
            windows = arrays.pop("window")  # [micro_batch, seq + 1]
            arrays = {"input_ids": windows[:, :-1].copy(), "labels": windows[:, 1:].copy()} | arrays
        if not self.shuffle:
            arrays["labels"][max(0, self.order.num_samples - first) :] = IGNORE_INDEX
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self.pin_memory else batch

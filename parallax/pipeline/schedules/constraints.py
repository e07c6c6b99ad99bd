"""What a schedule asks of the numbers of ranks, of micro-batches and of stages on a rank, and the sentence if it is not so."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import ConfigError

_COUNTS = {1: "", 2: "an even number of "}  # no schedule asks for other multiples
DEFAULT_CHUNKS = 2  # of schedules that leave it open how many stages a rank holds


@dataclass(frozen=True)
class Constraints:
    """The sizes that a schedule has a table for.

    chunks: stages that a rank holds of one pipe; None where the user says.
    least_chunks: what the user must say at least.
    ranks_multiple, micro_batches_multiple: the numbers must be multiples of these.
    micro_batches_per_rank: so many micro-batches a step for each rank, at least.
    for_other_ranks: the schedule to use where the number of ranks is no such multiple.
    """

    chunks: int | None = 1
    least_chunks: int = 1
    ranks_multiple: int = 1
    micro_batches_multiple: int = 1
    micro_batches_per_rank: int = 0
    for_other_ranks: str = ""

    def num_stages(self, num_ranks: int, num_chunks: int | None = None) -> int:
        """Return into how many stages the model is cut for `num_ranks`."""
        return num_ranks * (self.chunks or num_chunks or DEFAULT_CHUNKS)

    def least_micro_batches(self, num_ranks: int) -> int:
        """Return the smallest number of micro-batches a step that there is a table for."""
        multiple = self.micro_batches_multiple
        return max(1, -(-self.micro_batches_per_rank * num_ranks // multiple)) * multiple

    def check(self, name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> None:
        """Raise ConfigError, with the nearest sizes that are possible, if schedule `name` has no table for these."""
        if num_ranks < 1 or num_micro_batches < 1:
            raise ConfigError(
                f"schedule {name} needs at least 1 stage (--pp) and 1 micro-batch per step "
                f"(--global-batch / (--micro-batch * dp)); got {num_ranks} and {num_micro_batches}"
            )
        self._check_chunks(name, num_chunks)
        if num_ranks % self.ranks_multiple:
            raise ConfigError(
                f"schedule {name} needs {_COUNTS[self.ranks_multiple]}ranks (--pp), not {num_ranks}; "
                f"use {_nearest(num_ranks, self.ranks_multiple, 1)}, or {self.for_other_ranks}"
            )
        least, multiple = self.least_micro_batches(num_ranks), self.micro_batches_multiple
        if num_micro_batches < least or num_micro_batches % multiple:
            raise ConfigError(
                f"schedule {name} needs {_COUNTS[multiple]}micro-batches per step, at least "
                f"{self.micro_batches_per_rank} for each of the {num_ranks} ranks, not {num_micro_batches} "
                f"(--global-batch / (--micro-batch * dp)); use {_nearest(num_micro_batches, multiple, least)}, or 1f1b"
            )

    def _check_chunks(self, name: str, num_chunks: int | None) -> None:
        if num_chunks is None:
            return
        if self.chunks is not None:
            raise ConfigError(
                f"schedule {name} says itself how many stages a rank holds ({self.chunks}); leave out --chunks, which is "
                "for interleaved and interleaved-paired"
            )
        if num_chunks < self.least_chunks:
            raise ConfigError(
                f"schedule {name} needs at least {self.least_chunks} stages on each rank (--chunks), not {num_chunks}; "
                "with one the schedule is 1f1b"
            )


def _nearest(size: int, multiple: int, least: int) -> str:
    below = size - size % multiple
    return " or ".join(str(near) for near in (below, below + multiple) if near >= least) or str(least)

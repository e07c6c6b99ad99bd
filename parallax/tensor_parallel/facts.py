"""What is true of a parameter, in one record that its layer makes and lists.

The optimizer, the gradient norm, the checkpoint, the initialisation and the planner read these records; none of them
knows layers by name. A module with parameters of its own has an attribute `parameter_facts: dict[str, ParameterFacts]`;
`named_parameters_with_facts` collects them. A module without it (a plain nn.Linear in a user's model) is taken as held
whole and equal by every tp rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from parallax.mesh import Group, Replicas, rank_of, size_of


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter as this rank holds it.

    full_shape: shape of the whole tensor, as a checkpoint has it: unsharded, without padding.
    shard_dim: the dim along which it is split over tp, or None when each holder has all of it.
    shard_start: index in the full tensor of the first row (or column) held here.
    shard_rows: rows (or columns) along shard_dim held here that exist in the full tensor; the local tensor may have
        more, which are padding: zero, never trained, never saved.
    replicas: the ranks beyond dp that hold the same slice.
    partial: whether a holder's gradient is a part, and the true one the sum over the holders along tp (norm weights
        under sequence parallelism, shared KV heads); if not, every holder along tp computes the whole gradient.
    decays: whether weight decay applies (matrices, not norms and biases).
    is_table: whether it has a row for each token or position (an embedding, the head) and is no map between hidden states; Muon
        leaves tables to AdamW.
    std: standard deviation of the normal initial values, or None for a constant.
    constant: initial value when std is None.
    """

    full_shape: tuple[int, ...]
    shard_dim: int | None = None
    shard_start: int = 0
    shard_rows: int = 0
    replicas: Replicas = Replicas()
    partial: bool = False
    decays: bool = True
    is_table: bool = False
    std: float | None = None
    constant: float = 0.0

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the real, unpadded slice on this rank."""
        if self.shard_dim is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.shard_dim] = self.shard_rows
        return tuple(shape)

    @property
    def start(self) -> tuple[int, ...]:
        """Index in the full tensor of the first element held here."""
        return tuple(self.shard_start if dim == self.shard_dim else 0 for dim in range(len(self.full_shape)))

    def held(self, local: torch.Tensor) -> torch.Tensor:
        """Return the view of a local tensor without its padding."""
        return local if self.shard_dim is None else local.narrow(self.shard_dim, 0, self.shard_rows)


def replicated(
    shape: tuple[int, ...], tp: Group | None, *, partial: bool = False, constant: float = 0.0, std: float | None = None
) -> ParameterFacts:
    """Facts of a parameter that every tp rank holds whole; it decays if it is a matrix."""
    replicas = Replicas(tp=size_of(tp))
    return ParameterFacts(shape, replicas=replicas, partial=partial, decays=len(shape) > 1, constant=constant, std=std)


def sharded(
    shape: tuple[int, ...],
    dim: int,
    tp: Group | None,
    *,
    shards: int | None = None,
    padded: int | None = None,
    std: float | None = None,
    decays: bool = True,
    is_table: bool = False,
) -> ParameterFacts:
    """Facts of a parameter split along `dim` over tp.

    shards: into how many slices, each held by tp / shards neighbouring ranks; None: one per rank.
    padded: size of `dim` including padding, a multiple of the number of slices; None: the full size.
    """
    shards = shards or size_of(tp)
    rows = (padded or shape[dim]) // shards
    start = rank_of(tp) // (size_of(tp) // shards) * rows
    shared = size_of(tp) // shards
    return ParameterFacts(
        shape,
        shard_dim=dim,
        shard_start=min(start, shape[dim]),
        shard_rows=max(0, min(shape[dim] - start, rows)),
        replicas=Replicas(tp=shared),
        partial=shared > 1,
        decays=decays,
        is_table=is_table,
        std=std,
    )


def named_parameters_with_facts(
    module: nn.Module, tp: Group | None = None
) -> Iterator[tuple[str, nn.Parameter, ParameterFacts]]:
    """Yield (name, parameter, facts) of every parameter once, in the order of `module.named_parameters()`.

    A parameter reachable under two names (tied embeddings on one stage) comes once, under its first.
    tp: for modules that list no facts: their parameters are held whole, with equal gradients, by all of its ranks.
    """
    for name, parameter in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        listed: dict[str, ParameterFacts] = getattr(owner, "parameter_facts", {})
        yield name, parameter, listed.get(leaf) or replicated(tuple(parameter.shape), tp)


def update_facts(module: nn.Module, name: str, **changes: Any) -> None:
    """Replace fields of the record of the parameter at dotted `name`."""
    path, _, leaf = name.rpartition(".")
    listed: dict[str, ParameterFacts] = getattr(module.get_submodule(path), "parameter_facts")  # noqa: B009
    listed[leaf] = dataclasses.replace(listed[leaf], **changes)


# Elements that one draw of the generator makes: small enough that a shard wastes little at its edges.
_BLOCK = 1 << 16


def initial_values(name: str, facts: ParameterFacts, seed: int) -> np.ndarray:
    """Return the fp32 initial values of the slice held here, a function of (seed, name, index in the full tensor).

    The full tensor, read in row-major order, is cut into blocks, and block b is drawn by a counter-based generator
    (Salmon et al. 2011, Philox) whose key is a hash of seed and name and whose counter starts at b: any slice can be
    made without the rest, and no layout changes a value.
    """
    if facts.std is None:
        return np.full(facts.held_shape, facts.constant, dtype=np.float32)
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype=np.uint64)
    columns = int(np.prod(facts.full_shape[1:], dtype=np.int64))
    first, rows = 0, facts.full_shape[0]
    if facts.shard_dim == 0:
        first, rows = facts.shard_start, facts.shard_rows
    result = np.empty((rows, int(np.prod(facts.held_shape[1:], dtype=np.int64))), dtype=np.float32)
    keep = slice(None)
    if facts.shard_dim not in (None, 0):
        assert len(facts.full_shape) == 2, f"{name}: a tensor split along a dim that is not its first must be a matrix"
        keep = slice(facts.shard_start, facts.shard_start + facts.shard_rows)
    step = max(1, (4 * _BLOCK) // max(columns, 1))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        flat = _normal_range(key, (first + row) * columns, count * columns)
        result[row : row + count] = flat.reshape(count, columns)[:, keep]
    result *= facts.std
    return result.reshape(facts.held_shape)


def _normal_range(key: np.ndarray, start: int, count: int) -> np.ndarray:
    """Elements [start, start + count) of the endless standard normal sequence of `key`."""
    parts = []
    for block in range(start // _BLOCK, -(-(start + count) // _BLOCK)):
        draw = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, block])).standard_normal(
            _BLOCK, np.float32
        )
        parts.append(draw[max(0, start - block * _BLOCK) : start + count - block * _BLOCK])
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter of `module` from its facts, in place; padding becomes zero."""
    for name, parameter, facts in named_parameters_with_facts(module):
        parameter.zero_()
        facts.held(parameter).copy_(torch.from_numpy(initial_values(name, facts, seed)))

"""What buckets cannot be made of, told before anything hangs or trains the wrong thing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from parallax.collectives import gather_json
from parallax.data_parallel.plan import BucketPlan, Levels
from parallax.mesh import Mesh
from parallax.tensor_parallel.facts import ParameterFacts
from parallax.tensor_parallel.scopes import ParameterScope

NamedParameter = tuple[str, nn.Parameter, ParameterFacts]
Trained = dict[str, tuple[nn.Parameter, ParameterFacts]]


def trained_parameters(parameters: Iterable[NamedParameter]) -> Trained:
    """Return the trained parameters by name; raises ValueError for what comes twice, or is in other buckets."""
    found: Trained = {}
    names: dict[nn.Parameter, str] = {}
    for name, parameter, facts in parameters:
        if not parameter.requires_grad:
            continue
        if name in found:
            raise ValueError(
                f"two parameters are called {name}; give each a name of its own, as with its module's before"
            )
        if parameter in names:
            raise ValueError(f"{names[parameter]} and {name} are one parameter; give it once")
        if "gradient_sink" in vars(parameter):
            raise ValueError(f"{name} is in other GradientBuckets already; a model has one")
        found[name], names[parameter] = (parameter, facts), name
    return found


def check_scopes(chains: Iterable[Sequence[ParameterScope]], trained: Trained) -> None:
    """Raise ValueError unless scopes have all of the trained parameters."""
    covered = {parameter for chain in chains for scope in chain for parameter in scope.parameters()}
    for name, (parameter, _) in trained.items():
        if parameter not in covered:
            raise ValueError(
                f"overlap_gather lets a scope's forward wait for its parameters, and {name} is in none of `scopes`"
            )


def check_agreement(plans: Sequence[BucketPlan], levels: Sequence[Levels], mesh: Mesh) -> None:
    """Let all ranks compare their plans: where holders have different ones they would hang or mix up parameters.

    Called by all ranks; raises RuntimeError on all of them.
    """
    of_holders: dict[tuple[int, ...], list] = {}
    for plan, level in zip(plans, levels, strict=True):
        # A tied embedding is used by another stage on each of its holders.
        same = replace(plan, key=replace(plan.key, unit=()))
        of_holders.setdefault(plan.key.holders, []).append((same, level.num_shards, len(level.copies)))
    mine = [(holders, hashlib.sha256(repr(plan).encode()).hexdigest()) for holders, plan in of_holders.items()]
    rows: list[Mapping[tuple[int, ...], str]] = [
        {tuple(holders): digest for holders, digest in row} for row in gather_json(mine, mesh.world, mesh.device)
    ]
    for holders in dict.fromkeys(holders for row in rows for holders in row):
        if len({rows[rank].get(holders) for rank in holders}) > 1:
            raise RuntimeError(
                f"ranks {', '.join(map(str, holders))} hold the same parameters, but the names, sizes or types of what they "
                f"train of them are not the same"
            )

"""What several ranks hold is one thing: copies of a parameter are the same, bit for bit, after training."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import pytest

from parallax.collectives import gather_json
from parallax.mesh import Layout, Mesh
from parallax.models.stages import EMBEDDING
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL, Case, build, loader_of

TIED = replace(SMALL, num_hidden_layers=8, tie_word_embeddings=True)
CASES = [
    Case(model=TIED, schedule=schedule, zero=zero, micro_batch=1, global_batch=8, steps=10)
    for schedule in ("1f1b", "interleaved", "zb-v", "dualpipe", "dualpipev")
    for zero in (0, 1)
]


def digests(mesh: Mesh) -> list[list[dict[str, str]]]:
    """Return, for each case, every rank's parameters as hashes of their bytes."""
    found = []
    for case in CASES:
        step, loader = build(mesh, case), loader_of(mesh, case)
        for number in range(case.steps):
            step(loader.micro_batches(number), 1e-2)
        mine = {
            name: blake2b(parameter.detach().numpy().tobytes()).hexdigest() for name, parameter, _ in step.parameters
        }
        found.append(gather_json(mine, mesh.world))
    return found


@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2)], ids=str)
def test_copies_stay_equal_under_every_way_of_holding_them(layout: Layout) -> None:
    for case, ranks in zip(CASES, run_layout(layout, digests)[0], strict=True):
        for name in {name for rank in ranks for name in rank}:
            copies = [rank[name] for rank in ranks if name in rank]
            assert len(set(copies)) == 1, (case.schedule, case.zero, name)
            held_by_all = (
                name == EMBEDDING and case.schedule not in ("zb-v", "dualpipev")
            ) or case.schedule == "dualpipe"
            assert len(copies) == (4 if held_by_all else 2), (case.schedule, name)

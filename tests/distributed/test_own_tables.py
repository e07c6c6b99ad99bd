"""Tables that a user writes, with stages where no schedule of ours has them, train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.mesh import Layout
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL, Case, train_all

TIED = replace(SMALL, tie_word_embeddings=True)

# Who holds the stages, and the embedding that first and last stage share, so that no two ranks have the same neighbours.
CHAIN = """\
0F0,0B0
b2F1,b2B1
2F0,2B0,b1F1,b1B1
b0F1,1F0,1B0,b0B1
"""
# The embedding is with the first stage on both ranks, and with the last on one.
ONE_SIDED = """\
0F0,0B0
1F0,b0F1,b1F1,b1B1,b0B1,1B0
"""
# Pairs, split backwards, stages of one rank that are not neighbours, the last micro-batch first.
MIXED = """\
0F1,0F0,2F1,(2F0|2B1),2I0,0B1,0I0,2W0,0W0
1F1,3F1,1F0,3B1,(3F0|1B1),3I0,1I0,3W0,1W0
"""


def _check(layout: Layout, table: str) -> None:
    cases = [
        Case(TIED, zero=zero, schedule=table, micro_batch=1, global_batch=2, steps=2, precision="fp64")
        for zero in (0, 1, 2, 3)
    ]
    (expected,) = run_layout(Layout(), train_all, [cases[0].reference])[0]
    for results in run_layout(layout, train_all, cases, timeout=120):
        for case, result in zip(cases, results, strict=True):
            for got, want in zip(result, expected, strict=True):
                assert got == pytest.approx(want, rel=1e-10), case


def test_ranks_that_share_stages_in_a_chain_agree_on_the_order_of_reductions() -> None:
    _check(Layout(pp=4), CHAIN)


@pytest.mark.parametrize("table", [ONE_SIDED, MIXED], ids=["one-sided", "mixed"])
def test_a_tied_embedding_and_any_order_of_micro_batches_train_as_in_one_process(table: str) -> None:
    _check(Layout(pp=2), table)

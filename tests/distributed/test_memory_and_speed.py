"""What saves memory or time changes no loss: to the last bit where the same operations run, to rounding where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.mesh import Layout
from tests.distributed.harness import run_layout
from tests.distributed.test_parity import LAYOUTS, QWEN3, TIED
from tests.distributed.test_parity import _check as check_parity
from tests.distributed.training import Case, train_all

LONG = Case(seq_len=16, micro_batch=2, loss_chunk=5)  # a micro-batch of 32 tokens in seven parts
CHUNKED = {
    "dp2": [replace(LONG, zero=zero, model=TIED) for zero in (0, 2, 3)],
    "tp2": [LONG, replace(LONG, sp=True, zero=2), replace(LONG, model=TIED, sp=True, recompute="full")],
    "pp2": [
        replace(LONG, model=TIED, zero=2),
        replace(LONG, schedule="zb-h1", micro_batch=1, zero=2),
        replace(LONG, schedule="dualpipe", micro_batch=1),
    ],
    "tp2 pp2": [replace(LONG, schedule="dualpipe", micro_batch=1, sp=True, zero=3, model=QWEN3)],
}


@pytest.mark.parametrize("layout", CHUNKED)
def test_losses_from_chunks_of_logits_are_those_of_whole_ones(layout: str) -> None:
    check_parity(LAYOUTS[layout], CHUNKED[layout])


def test_chunks_of_logits_agree_to_ten_digits_in_float64() -> None:
    cases = [replace(LONG, precision="fp64", steps=3, sp=sp, micro_batch=1) for sp in (False, True)]
    check_parity(Layout(tp=2), cases, rel=1e-10)


RECOMPUTED = {
    "one": (Layout(), [Case(steps=3), Case(steps=3, precision="bf16", model=QWEN3)]),
    "tp2": (Layout(tp=2), [Case(steps=3, sp=True), Case(steps=3, zero=3, model=QWEN3)]),
    "pp2": (Layout(pp=2), [Case(steps=3, zero=2, schedule="zb-h1", micro_batch=1)]),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputing_changes_no_bit_of_a_loss_or_norm(name: str) -> None:
    layout, cases = RECOMPUTED[name]
    kinds = [[replace(case, recompute=kind) for case in cases] for kind in ("none", "selective", "full")]
    for rank in run_layout(layout, train_all, [case for kind in kinds for case in kind], timeout=300):
        kept, selective, full = (rank[i * len(cases) : (i + 1) * len(cases)] for i in range(3))
        assert selective == kept and full == kept

"""Between two logged steps the host never waits for a GPU: it only tells it what to do next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from parallax.mesh import Layout, Mesh
from parallax.precision.options import Fp8Options
from parallax.training.faults import Judge
from parallax.training.step import TrainStep
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL, Case, build, loader_of

Batches = Sequence[Mapping[str, torch.Tensor]]

TWO_LAYERS = replace(SMALL, num_hidden_layers=2)
BF16 = Case(model=TWO_LAYERS, precision="bf16", micro_batch=1, global_batch=4)
PACKED, SPIKES = "packed rows", "a limit for spikes"

# What a run may be made of. Rows of several documents are attended one by one here, as on a GPU that has no kernel for them.
CASES: dict[str, tuple[Layout, Case, tuple[str, ...]]] = {
    "one": (Layout(), BF16, (SPIKES,)),
    "dp 2, zero 0": (Layout(dp=2), replace(BF16, zero=0), (SPIKES,)),
    "dp 2, zero 1, weights that are waited for": (Layout(dp=2), replace(BF16, overlap_gather=False), (SPIKES,)),
    "dp 2, zero 1": (Layout(dp=2), BF16, (SPIKES,)),
    "dp 2, zero 2": (Layout(dp=2), replace(BF16, zero=2), (SPIKES,)),
    "dp 2, zero 3": (Layout(dp=2), replace(BF16, zero=3), (SPIKES,)),
    "dp 2, narrow types": (Layout(dp=2), replace(BF16, narrow=("main_grad_dtype", "moment_dtype")), ()),
    "pp 2": (Layout(pp=2), BF16, (SPIKES,)),
    "pp 2, zb-h1": (Layout(pp=2), replace(BF16, schedule="zb-h1"), (SPIKES,)),
    "pp 2, dualpipe": (Layout(pp=2), replace(BF16, schedule="dualpipe"), (SPIKES,)),
    "tp 2": (Layout(tp=2), BF16, (SPIKES,)),
    "tp 2, sequence parallel": (Layout(tp=2), replace(BF16, sp=True), (SPIKES,)),
    "tp 2, pp 2, dp 2, tied": (
        Layout(tp=2, pp=2, dp=2),
        replace(BF16, zero=3, sp=True, model=replace(TWO_LAYERS, tie_word_embeddings=True)),
        (SPIKES,),
    ),
    "recomputed, in chunks": (Layout(), replace(BF16, recompute="full", loss_chunk=8), ()),
    "muon": (Layout(), replace(BF16, optimizer="muon"), ()),
    "packed rows": (Layout(dp=2), BF16, (PACKED, SPIKES)),
    "fp8, tiles": (Layout(tp=2), replace(BF16, precision="fp8", fp8=Fp8Options(fp8_backend="reference")), ()),
    "fp8, delayed": (
        Layout(dp=2),
        replace(BF16, precision="fp8", fp8=Fp8Options(fp8_recipe="delayed", fp8_backend="reference")),
        (),
    ),
}


def _batches(mesh: Mesh, case: Case, packed: bool) -> Batches:
    batches = list(loader_of(mesh, case).micro_batches(0))
    if not packed:
        return batches
    documents = torch.arange(case.seq_len).div(6, rounding_mode="floor").expand(case.micro_batch, -1)
    positions = torch.arange(case.seq_len).remainder(6).expand(case.micro_batch, -1)
    return [batch | {"documents": documents, "positions": positions} for batch in batches]


def _waits(mesh: Mesh, names: Sequence[str]) -> dict[str, list[str]]:
    from tests.training.fake_device import prepare, waits_of_a_step

    prepare()
    found = {}
    for name in names:
        layout, case, parts = CASES[name]

        def make(mesh: Mesh, case: Case = case, parts: tuple[str, ...] = parts) -> TrainStep:
            step = build(mesh, case)
            step.judge = Judge(mesh.device, spike_factor=2.0 if SPIKES in parts else None)
            if step.fp8 is not None and step.fp8.scales is not None:
                step.fp8.scales.known = True  # the first step asks once whether it was measured
            return step

        def batches(mesh: Mesh, case: Case = case, parts: tuple[str, ...] = parts) -> Batches:
            return _batches(mesh, case, PACKED in parts)

        found[name] = waits_of_a_step(layout, make, batches)
    return found


ALWAYS = ["dp 2, zero 1", "dp 2, zero 3", "pp 2", "tp 2, sequence parallel", "packed rows", "fp8, delayed"]


@pytest.mark.parametrize("names", [ALWAYS, pytest.param([*CASES], marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_step_that_is_not_logged_never_waits_for_the_device(names: list[str]) -> None:
    (found,) = run_layout(Layout(), _waits, names)
    assert found == {name: [] for name in names}


WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "truth": lambda loss: bool(loss > 0),
    "float": float,
    "a mask": lambda loss: loss.view(1)[loss.view(1) > 0],
    "nonzero": lambda loss: loss.view(1).nonzero(),
    "masked_select": lambda loss: loss.view(1).masked_select(loss.view(1) > 0),
    "unique": lambda loss: loss.view(1).unique(),
    "equal": lambda loss: torch.equal(loss, loss + 1),
    "to the host": lambda loss: loss.cpu(),
    "copied to the host": lambda loss: torch.empty((), dtype=loss.dtype).copy_(loss),
    "from the host": lambda loss: torch.tensor([1.0], device=loss.device) + loss,
}


def _noticed(mesh: Mesh) -> dict[str, list[str]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.training.fake_device import prepare, waits_of

    prepare()
    with FakeTensorMode():
        loss = torch.zeros((), device="late")
        return {name: waits_of(partial(read, loss)) for name, read in WAITING.items()}


def test_whatever_waits_is_noticed() -> None:
    (found,) = run_layout(Layout(), _noticed)
    assert [name for name, waits in found.items() if len(waits) != 1] == [], found

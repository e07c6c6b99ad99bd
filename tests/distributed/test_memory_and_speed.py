"""What saves memory or time changes no loss: to the last bit where the same operations run, to rounding where they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from tests.distributed.harness import run_layout
from tests.distributed.test_parity import GPT, LAYOUTS, QWEN3, TIED
from tests.distributed.test_parity import _check as check_parity
from tests.distributed.training import SMALL, Case, build, train, train_all

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


COMPILED = Case(steps=4, compiled=True)


def test_what_is_compiled_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiler(function: Any, dynamic: bool) -> Any:
        return lambda *tensors: calls.append(function.__name__) or function(*tensors)

    monkeypatch.setattr(torch, "compile", compiler)
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    compiled = train(mesh, replace(COMPILED, steps=2))
    assert calls.count("_rotated_attention") == calls.count("_swiglu") == 2 * 4 * SMALL.num_hidden_layers
    for got, want in zip(compiled, train(mesh, COMPILED.reference), strict=False):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.slow  # the compiler takes its time
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["one", "tp2"])
def test_compiled_layers_give_the_losses_of_others(name: str) -> None:
    cases = {
        "one": [COMPILED, replace(COMPILED, model=GPT), replace(COMPILED, recompute="full", model=QWEN3)],
        "tp2": [replace(COMPILED, sp=True, zero=3)],
    }[name]
    check_parity({"one": Layout(), "tp2": Layout(tp=2)}[name], cases)


def test_without_a_compiler_the_option_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    with pytest.raises(
        ConfigError, match=r"--compile cannot be used: torch's compiler needs a C\+\+ compiler on a CPU"
    ) as error:
        build(Mesh(Layout(), 0, torch.device("cpu")), COMPILED)
    assert len(error.value.problems) == 1

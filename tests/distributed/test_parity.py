"""The layout is never visible in the loss: losses and gradient norms of ten steps equal those of one process.

A table of layouts and of everything else that may not matter. A part of it runs always; `-m slow` runs the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from parallax.mesh import Layout, Mesh
from parallax.models.presets import PRESETS
from parallax.pipeline.schedules import ALL_SCHEDULES
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL, Case, train_all

LAYOUTS = {
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "pp2": Layout(pp=2),
    "pp4": Layout(pp=4),
    "tp2 pp2": Layout(tp=2, pp=2),
    "tp2 pp2 dp2": Layout(tp=2, pp=2, dp=2),
}
MORE_LAYOUTS = {"dp4": Layout(dp=4), "pp2 dp2": Layout(pp=2, dp=2), "tp2 dp4": Layout(tp=2, dp=4)}
TIED = replace(SMALL, tie_word_embeddings=True)
ONE_KV_HEAD = replace(SMALL, num_key_value_heads=1)
QWEN3 = replace(SMALL, family="qwen3", qk_norm=True, num_key_value_heads=1, tie_word_embeddings=True)
GPT = replace(
    SMALL,
    family="gpt2",
    norm="layernorm",
    activation="gelu",
    positions="learned",
    bias=True,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
MANY_STAGES = [name for name in ALL_SCHEDULES if name not in ("1f1b", "gpipe")]
DEFAULT = Case(model=PRESETS["tiny"].resolved(), seq_len=128, global_batch=16)


def _check(layout: Layout, cases: list[Case], rel: float = 1e-5, train: Callable = train_all) -> None:
    references = list(dict.fromkeys(case.reference for case in cases))
    expected = dict(zip(references, run_layout(Layout(), train_all, references, timeout=300)[0], strict=True))
    for results in run_layout(layout, train, cases, timeout=300):
        for case, result in zip(cases, results, strict=True):
            for step, (got, want) in enumerate(zip(result, expected[case.reference], strict=True)):
                assert got == pytest.approx(want, rel=rel), f"{layout}, {case}, step {step}"
            assert case.steps < 5 or result[-1][0] < result[0][0], "the loss did not fall"


# For each layout, cases that between them hold every option; pairs of layouts share the rest.
ALWAYS = {
    "dp2": [Case(zero=0), Case(zero=1, model=TIED, micro_batch=1)],
    "tp2": [Case(sp=True), Case(model=TIED, zero=0, recompute="full")],
    "tp4": [
        Case(model=QWEN3, sp=True),
        Case(model=ONE_KV_HEAD, zero=0),
        Case(model=GPT, sp=True, recompute="selective"),
    ],
    "pp2": [Case(model=TIED, zero=0, schedule="gpipe"), Case(model=GPT, pipeline_layout="Et|t*3L")],
    "pp4": [Case(micro_batch=1), Case(model=QWEN3, schedule="gpipe")],
    "tp2 pp2": [Case(model=TIED, sp=True), Case(model=GPT, zero=0, micro_batch=1)],
    "tp2 pp2 dp2": [Case(model=TIED), Case(sp=True, zero=0, schedule="gpipe", recompute="full")],
}


def _slow(table: Iterable[str], *slow: str) -> list[Any]:
    """Return the layouts of a table, some of which, that another one covers by and large, run with `-m slow` only."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in table]


@pytest.mark.parametrize("layout", _slow(LAYOUTS, "tp4"))
def test_losses_and_norms_equal_those_of_one_process(layout: str) -> None:
    _check(LAYOUTS[layout], ALWAYS[layout])


def test_the_default_model_in_three_dimensions_equals_one_process() -> None:
    _check(LAYOUTS["tp2 pp2 dp2"], [replace(DEFAULT, steps=4)])


SIX_LAYERS = replace(SMALL, num_hidden_layers=6, tie_word_embeddings=True)
EIGHT_LAYERS = replace(SMALL, num_hidden_layers=8, tie_word_embeddings=True)
UNEVEN = "Et*2|t|t|t*2L"


def _scheduled(name: str, **choices: Any) -> Case:
    return Case(schedule=name, micro_batch=1, **{"model": EIGHT_LAYERS, "steps": 4, **choices})


# Every schedule beside those above; DualPipe takes at least two micro-batches for each rank.
SCHEDULED = {
    "pp2": [
        *(_scheduled(name) for name in MANY_STAGES),
        _scheduled("dualpipe", zero=0),
        _scheduled("zb-h1", model=GPT, recompute="full"),
        _scheduled("zb-v", model=SIX_LAYERS, pipeline_layout=UNEVEN, global_batch=3),
        _scheduled("interleaved", chunks=3, model=SIX_LAYERS, global_batch=5),
    ],
    "pp4": [*(_scheduled(name) for name in MANY_STAGES), _scheduled("dualpipev", global_batch=12, zero=0)],
    "tp2 pp2": [
        _scheduled("dualpipe", sp=True, model=GPT),
        _scheduled("dualpipev", sp=True, recompute="selective"),
        _scheduled("zb-v", sp=True, model=QWEN3, zero=0),
    ],
    "tp2 pp2 dp2": [_scheduled("dualpipe", model=TIED), _scheduled("zb-h1", sp=True, zero=0), _scheduled("dualpipev")],
}


@pytest.mark.parametrize("layout", _slow(SCHEDULED, "tp2 pp2"))
def test_every_schedule_equals_one_process(layout: str) -> None:
    _check(LAYOUTS[layout], SCHEDULED[layout])


@pytest.mark.parametrize("layout", ["pp2", "tp2 pp2"])
def test_in_float64_every_schedule_equals_one_process_to_ten_digits(layout: str) -> None:
    cases = [_scheduled(name, precision="fp64", steps=2) for name in MANY_STAGES if name != "1f1b-eager"]
    _check(LAYOUTS[layout], cases, rel=1e-10)


# ZeRO 2 sums gradients, and ZeRO 3 gathers parameters, over dp and over what else holds a copy on the same pipeline rank.
SHARDED = {
    "dp2": [
        Case(zero=2, micro_batch=1),
        Case(zero=2, model=TIED, micro_batch=1, recompute="full"),
        Case(zero=3, model=TIED, micro_batch=1),
        Case(zero=3, model=GPT, recompute="full"),
        Case(zero=3, optimizer="sgd"),
    ],
    "tp2": [Case(zero=2, sp=True), Case(optimizer="sgd", zero=2, model=TIED), Case(zero=3, sp=True, model=QWEN3)],
    "dp4": [Case(zero=zero, zero_group=2, micro_batch=1, model=TIED) for zero in (1, 2, 3)],
    "pp2 dp2": [
        Case(zero=2, model=TIED, micro_batch=1),
        *(
            _scheduled(name, zero=zero, model=TIED)
            for name in ("zb-h1", "zb-v", "dualpipe", "dualpipev", "interleaved")
            for zero in (2, 3)
        ),
        _scheduled("gpipe", zero=3, recompute="selective"),
    ],
    "tp2 pp2": [
        *(_scheduled("dualpipe", zero=zero, sp=True, model=GPT) for zero in (2, 3)),
        *(_scheduled("zb-v", zero=zero, sp=True, model=QWEN3) for zero in (2, 3)),
    ],
    "tp2 dp4": [Case(zero=zero, zero_group=2, micro_batch=1, sp=True, model=QWEN3) for zero in (2, 3)],
    "tp2 pp2 dp2": [
        *(Case(zero=zero, model=TIED, sp=True) for zero in (2, 3)),
        *(_scheduled("dualpipe", zero=zero, sp=True, model=TIED) for zero in (2, 3)),
        _scheduled("1f1b", zero=3, recompute="full"),
    ],
}


def train_over_gloo(mesh: Mesh, cases: list[Case]) -> list[list[tuple[float, float]]]:
    """Train each case without shared memory: reductions and gathers are in flight while others compute."""
    mesh = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
    return train_all(mesh, cases)


OVER_GLOO = {
    "dp2": [Case(zero=zero, model=TIED, micro_batch=1) for zero in (2, 3)],
    "pp2 dp2": [
        *(_scheduled(name, zero=zero, model=TIED) for name in ("zb-h1", "dualpipe") for zero in (2, 3)),
    ],
    "dp4": [Case(zero=3, zero_group=2, micro_batch=1, optimizer="muon")],
}


@pytest.mark.parametrize("layout", OVER_GLOO)
def test_communication_in_flight_changes_no_loss(layout: str) -> None:
    cases = OVER_GLOO[layout]
    _check(LAYOUTS.get(layout) or MORE_LAYOUTS[layout], cases, train=train_over_gloo)


# Muon needs whole matrices: cut by tp, shared KV heads, held by two pipeline ranks, kept in pieces.
WITH_MUON = {
    "dp2": [Case(optimizer="muon", zero=zero, model=TIED) for zero in (1, 3)],
    "tp2": [Case(optimizer="muon", zero=0, sp=True, model=QWEN3), Case(optimizer="muon", zero=2, model=GPT)],
    "pp2": [_scheduled("dualpipe", optimizer="muon"), _scheduled("zb-v", optimizer="muon", zero=0)],
    "tp2 dp4": [Case(optimizer="muon", zero=2, zero_group=2, micro_batch=1, model=QWEN3)],
    "tp2 pp2 dp2": [_scheduled("dualpipe", optimizer="muon", zero=3, sp=True, model=TIED)],
}


@pytest.mark.parametrize("layout", _slow(WITH_MUON, "tp2"))
def test_muon_updates_whole_matrices_in_every_layout(layout: str) -> None:
    _check(LAYOUTS.get(layout) or MORE_LAYOUTS[layout], WITH_MUON[layout])


@pytest.mark.parametrize("layout", _slow(SHARDED, "pp2 dp2", "tp2 dp4", "tp2 pp2"))
def test_sharded_gradients_and_parameters_change_no_loss(layout: str) -> None:
    _check(LAYOUTS.get(layout) or MORE_LAYOUTS[layout], SHARDED[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_combination_equals_one_process(layout: str) -> None:
    choices = itertools.product((0, 1), (False, True), ("1f1b", "gpipe"), (1, 2), (SMALL, TIED, ONE_KV_HEAD, GPT))
    cases = [
        Case(model=model, zero=zero, sp=sp, schedule=schedule, micro_batch=micro_batch)
        for zero, sp, schedule, micro_batch, model in choices
        if not (sp and LAYOUTS[layout].tp == 1)
    ]
    _check(LAYOUTS[layout], cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_model_equals_one_process(layout: str) -> None:
    _check(LAYOUTS[layout], [DEFAULT, replace(DEFAULT, zero=0, sp=LAYOUTS[layout].tp > 1, micro_batch=1)])

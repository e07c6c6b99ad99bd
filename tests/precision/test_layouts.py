"""FP8 training is the same in every layout: each product, each scale, each loss.

Sizes are chosen so that tensor parallelism cuts tiles: 96 features of the MLP and 64 of a key over 2 and 4 ranks.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from parallax.collectives import gather_json
from parallax.mesh import Layout, Mesh
from parallax.precision import quantize_tiles
from parallax.precision.operands import Cut, quantize_shard
from parallax.precision.options import Fp8Options
from parallax.tensor_parallel.precision import Fp8State
from tests.distributed.harness import run_layout
from tests.distributed.test_parity import GPT
from tests.distributed.training import SMALL, Case, build, loader_of, train, train_all

MODEL = replace(SMALL, hidden_size=64, intermediate_size=96, head_dim=16, num_key_value_heads=4)
WIDE = replace(MODEL, intermediate_size=192)  # over 4 ranks: in multiples of 16, as delayed scaling needs them
GPT_MODEL = replace(GPT, hidden_size=64, intermediate_size=96, head_dim=16)
TILE, POWERS = Fp8Options(), Fp8Options(fp8_format="hybrid", fp8_scales="pow2", fp8_keep=("layers.0", "k_proj"))
DELAYED = Fp8Options(fp8_recipe="delayed", fp8_format="hybrid", fp8_margin=1, fp8_amax_history=3)
# Of weights that read the same input some are in FP8 and some are not.
MIXED = Fp8Options(fp8_keep=("q_proj", "layers.1.mlp.gate_proj"))
BASE = Case(model=MODEL, precision="fp8", steps=4, fp8=TILE)


def case(fp8: Fp8Options = TILE, **choices) -> Case:
    return replace(BASE, fp8=fp8, **choices)


CASES = {
    "tp2": (
        Layout(tp=2),
        [
            case(sp=True),
            case(DELAYED, zero=0, recompute="full"),
            case(POWERS, recompute="selective"),
            case(MIXED, sp=True),
        ],
    ),
    "tp4": (Layout(tp=4), [case(), case(DELAYED, sp=True, model=WIDE), case(sp=True, model=GPT_MODEL)]),
    "dp2": (Layout(dp=2), [case(zero=0), case(DELAYED), case(POWERS, zero=2)]),
    "pp2": (
        Layout(pp=2),
        [
            case(),
            case(DELAYED),
            case(DELAYED, schedule="zb-v"),
            case(DELAYED, schedule="dualpipe", micro_batch=1),
            case(POWERS, schedule="zb-h1"),
        ],
    ),
    "tp2 pp2": (
        Layout(tp=2, pp=2),
        [
            case(schedule="dualpipe", micro_batch=1),
            case(DELAYED, schedule="dualpipev", micro_batch=1, sp=True),
            *(case(MIXED, schedule="dualpipe", micro_batch=1, sp=sp) for sp in (False, True)),
        ],
    ),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(name, marks=SLOW) for name in ("pp2", "tp4", "dp2", "tp2 pp2"))]
)
def test_losses_and_norms_equal_those_of_one_process(layout: str) -> None:
    where, cases = CASES[layout]
    plain = [replace(one.reference, micro_batch=one.micro_batch) for one in cases]
    references = list(dict.fromkeys(plain))
    expected = dict(zip(references, run_layout(Layout(), train_all, references, timeout=200)[0], strict=True))
    for results in run_layout(where, train_all, cases, timeout=200):
        for reference, result in zip(plain, results, strict=True):
            for step, (got, want) in enumerate(zip(result, expected[reference], strict=True)):
                assert got == pytest.approx(want, rel=1e-5), (layout, reference, step)


def test_what_is_compared_is_fp8_and_not_bf16() -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    in_bf16 = train(mesh, replace(BASE, precision="bf16"))
    for fp8 in (TILE, POWERS, DELAYED):
        in_fp8 = train(mesh, case(fp8))
        assert in_fp8[-1][0] != pytest.approx(in_bf16[-1][0], rel=1e-5)
        assert in_fp8[-1][0] == pytest.approx(in_bf16[-1][0], rel=0.02)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("fp8", [TILE, DELAYED], ids=["tile", "delayed"])
def test_recomputation_changes_no_bit(recompute: str, fp8: Fp8Options) -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    assert train(mesh, case(fp8, recompute=recompute)) == train(mesh, case(fp8))


@pytest.mark.parametrize(
    ("layout", "choices"),
    [
        (Layout(dp=2), {}),
        pytest.param(Layout(dp=2), {"recompute": "full"}, marks=SLOW),
        pytest.param(Layout(tp=2, dp=2), {"sp": True}, marks=SLOW),
        pytest.param(Layout(pp=2, dp=2), {"schedule": "zb-v"}, marks=SLOW),
        pytest.param(Layout(tp=2, pp=2, dp=2), {"schedule": "dualpipe", "micro_batch": 1}, marks=SLOW),
    ],
    ids=str,
)
def test_weights_that_are_quantised_at_each_gathering_change_no_bit(layout: Layout, choices: dict) -> None:
    """Under ZeRO 3 the copies of weights go with the weights, and are made again."""
    cases = [case(fp8, zero=3, **choices) for fp8 in (TILE, DELAYED)]
    for gathered, kept in run_layout(layout, _trained_twice, cases, timeout=200):
        assert gathered == kept and gathered[0] != gathered[1]


def _trained_twice(mesh: Mesh, cases: list[Case]) -> list[list]:
    """Train as it is, and with copies that stay for a step as they do under ZeRO 2."""
    as_it_is = train_all(mesh, cases)
    with mock.patch.object(Fp8State, "forget_with", lambda *_: None):
        return [as_it_is, train_all(mesh, cases)]


def _scales(mesh: Mesh, one: Case) -> dict:
    """Return the scales after three steps and an evaluation, which must not count."""
    step, loader = build(mesh, one), loader_of(mesh, one)
    for i in range(3):
        step(loader.micro_batches(i), 1e-3)
    with torch.no_grad():
        batches = step.runner.on_device(loader.micro_batches(7))
        step.runner.run(step.runner.evaluating, batches, torch.ones(()))
    assert step.fp8 is not None and step.fp8.scales is not None
    return step.fp8.scales.to_dict() | {"pending": step.fp8.scales.amax.abs().sum().item()}


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [(Layout(tp=2), "1f1b"), (Layout(pp=2, dp=2), "1f1b"), (Layout(pp=2), "dualpipe")],
    ids=str,
)
def test_all_ranks_that_hold_a_layer_have_its_scales_and_no_others(layout: Layout, schedule: str) -> None:
    one = case(DELAYED, micro_batch=1, global_batch=8)
    (expected,) = run_layout(Layout(), _scales, one)
    held: set[str] = set()
    for scales in run_layout(layout, _scales, replace(one, schedule=schedule)):
        assert scales["pending"] == 0 and scales["num_updates"] == 3
        assert {name: expected["layers"][name] for name in scales["layers"]} == scales["layers"]
        held |= scales["layers"].keys()
    assert held == expected["layers"].keys()


def _mismatches(mesh: Mesh, full: int, shards: int) -> list[int]:
    """Quantise this rank's part of rows and of columns; count the bytes that differ from those of the whole."""
    assert mesh.tp is not None
    x = (torch.randn(full, full, generator=torch.Generator().manual_seed(0)) * 3).exp()
    x[1, 5] = torch.nan
    x[-1, -2] = torch.inf
    x[: full // 2, 40:60] = 0
    size = full // shards
    start = mesh.tp_rank // (mesh.layout.tp // shards) * size
    cut, here = Cut(start, size, full, mesh.tp), slice(start, start + size)
    found = []
    for tile in ((1, 128), (128, 1), (128, 128)):
        for power_of_two in (False, True):
            whole, _ = quantize_tiles(x, tile, "e4m3", power_of_two)
            whole = whole.view(torch.uint8)
            by_rows = quantize_shard(x[here], tile, "e4m3", power_of_two, rows=cut)
            by_columns = quantize_shard(x[:, here], tile, "e4m3", power_of_two, columns=cut)
            for operand, expected in ((by_rows, whole[here]), (by_columns, whole[:, here])):
                found.append(int((operand.data.view(torch.uint8) != expected).sum()))
                for one in (operand, operand.t(), operand.aligned()):
                    assert one.dequantized().isnan().sum() == operand.dequantized().isnan().sum()
                # With zeros before and after, as a kernel takes it, it stands for the same numbers.
                rows, columns = operand.lead
                inner = operand.aligned().dequantized()[rows : rows + expected.shape[0], columns:]
                same = inner[:, : expected.shape[1]].nan_to_num() == operand.dequantized().nan_to_num()
                assert same.all()
    return gather_json(sum(found), mesh.tp)


@pytest.mark.parametrize(("tp", "full", "shards"), [(2, 344, 2), (4, 192, 4), (4, 512, 4), (4, 320, 2)])
def test_shards_are_quantised_to_the_bytes_of_the_whole(tp: int, full: int, shards: int) -> None:
    for rank in run_layout(Layout(tp=tp), _mismatches, full, shards):
        assert rank == [0] * tp

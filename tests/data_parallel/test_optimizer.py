"""Sharded AdamW against torch's own on whole parameters."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallax.collectives import all_reduce_, same_on_all
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.norm import local_squared_norm
from parallax.data_parallel.optimizer import ShardedAdamW
from parallax.data_parallel.options import ZERO_STAGES
from parallax.mesh import Layout, Mesh, Replicas
from parallax.tensor_parallel.facts import ParameterFacts
from tests.data_parallel import toys
from tests.distributed.harness import run_layout, run_ranks

ROOT = Path(__file__).parents[2]
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RATES = (1e-2, 2e-2, 1e-2, 5e-3, 1e-3)
SHAPES = {f"p{size}": (size,) for size in toys.EDGE_SIZES} | {"matrix": (9, 13), "wide": (2, 70)}
DECAYS = {name: len(shape) > 1 or name in ("p3", f"p{5 * toys.BUCKET}") for name, shape in SHAPES.items()}


def _values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Gradients whose sum over ranks is exact, whatever its order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randint(-512, 512, shape, generator=generator) / 1024 for name, shape in SHAPES.items()}


def _step(parameters: list, buckets: GradientBuckets, optimizer: ShardedAdamW, rank: int, step: int) -> None:
    buckets.zero_grad()
    buckets.expect_last_backward()
    toys.backward_of(parameters, _gradients(rank, step))
    buckets.finish()
    toys.poison(buckets)
    optimizer.step(RATES[step])


def _train(mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    results = []
    for zero in ZERO_STAGES:
        parameters = toys.given(_values(), DECAYS)
        buckets = GradientBuckets(parameters, mesh, zero=zero, bucket_elements=toys.BUCKET)
        optimizer = ShardedAdamW(buckets, **SETTINGS)
        for step in range(len(RATES)):
            _step(parameters, buckets, optimizer, mesh.rank, step)
        assert all(same_on_all(parameter, mesh.dp) for _, parameter, _ in parameters)
        results.append({name: parameter.detach() for name, parameter, _ in parameters})
    return results


RANKS = pytest.mark.parametrize("ranks", [1, 2, 3])


@functools.cache
def _results(ranks: int) -> dict[str, list]:
    """Return, by case, the results of all ranks; one world runs all cases, since its start is what takes time."""
    every = run_ranks(ranks, _cases) if ranks > 1 else [_cases(toys.alone())]
    return {name: [result[name] for result in every] for name in every[0]}


def _cases(mesh: Mesh) -> dict[str, Any]:
    cases = (_train, _resume, _pieces, _decay_only, _hundred_bf16_steps)
    return {case.__name__: case(mesh) for case in cases}


@RANKS
def test_five_steps_equal_torch_adamw_on_whole_parameters(ranks: int) -> None:
    zero_0, *others = _results(ranks)["_train"][0]
    whole = {name: nn.Parameter(value) for name, value in _values().items()}
    reference = torch.optim.AdamW(
        [
            {"params": [whole[name] for name in whole if DECAYS[name]]},
            {"params": [whole[name] for name in whole if not DECAYS[name]], "weight_decay": 0.0},
        ],
        **SETTINGS,
        fused=False,
    )
    for step, rate in enumerate(RATES):
        for group in reference.param_groups:
            group["lr"] = rate
        every = [_gradients(rank, step) for rank in range(ranks)]
        for name, parameter in whole.items():
            parameter.grad = torch.stack([gradients[name] for gradients in every]).sum(0)
        reference.step()
    for name, parameter in whole.items():
        torch.testing.assert_close(zero_0[name], parameter.detach(), rtol=1e-7, atol=1e-7)
        assert all(torch.equal(zero_0[name], other[name]) for other in others)


def _resume(mesh: Mesh) -> list[str]:
    """Two steps, the state into a new optimizer, two steps; return what differs from four steps."""
    differing = []

    def start(zero: int, values: dict) -> tuple:
        parameters = toys.given(values, DECAYS)
        buckets = GradientBuckets(parameters, mesh, zero=zero, bucket_elements=toys.BUCKET)
        return parameters, buckets, ShardedAdamW(buckets, **SETTINGS)

    for dtype in (torch.float32, torch.bfloat16):
        values = {name: value.to(dtype) for name, value in _values().items()}
        unbroken, first = start(1, values), start(1, values)
        for step in range(4):
            _step(*unbroken, mesh.rank, step)
        for step in range(2):
            _step(*first, mesh.rank, step)
        second = start(1, {name: torch.full_like(value, 7) for name, value in values.items()})
        for (name, target, _), (_, source, _) in zip(second[0], first[0], strict=True):
            target.detach().copy_(source.detach())
            for into, out in zip(second[2].pieces(name), first[2].pieces(name), strict=True):
                assert (into.start, into.stop) == (out.start, out.stop)
                assert ("main_param" in out.tensors) == (dtype == torch.bfloat16)
                for kind, tensor in into.tensors.items():
                    tensor.copy_(out.tensors[kind])
        second[2].step_count = first[2].step_count
        for step in range(2, 4):
            _step(*second, mesh.rank, step)
        for (name, resumed, _), (_, whole, _) in zip(second[0], unbroken[0], strict=True):
            if not torch.equal(resumed, whole):
                differing.append(f"{name} {dtype}")
        assert second[2].step_count == 4
    return differing


@RANKS
def test_a_resumed_state_goes_on_bitwise_as_the_unbroken_one(ranks: int) -> None:
    assert _results(ranks)["_resume"] == [[]] * ranks


@RANKS
def test_pieces_of_all_ranks_are_each_parameter_once(ranks: int) -> None:
    merged = toys.join(_results(ranks)["_pieces"], {name: torch.Size(shape) for name, shape in SHAPES.items()})
    for name, shape in SHAPES.items():
        expected = torch.arange(torch.Size(shape).numel()).view(shape) * 0.1 * ranks
        torch.testing.assert_close(merged[name], expected)


def _pieces(mesh: Mesh) -> toys.Slices:
    parameters = toys.given(_values(), DECAYS)
    buckets = GradientBuckets(parameters, mesh, bucket_elements=toys.BUCKET)
    optimizer = ShardedAdamW(buckets, **SETTINGS)
    gradients = {name: torch.arange(value.numel()).view(value.shape) * 1.0 for name, value in _values().items()}
    toys.backward_of(parameters, gradients)
    buckets.finish()
    optimizer.step(0.0)
    # After one step the first moment is (1 - beta1) times the gradient.
    return {
        name: [(piece.start, piece.tensors["exp_avg"].clone()) for piece in optimizer.pieces(name)]
        for name, _, _ in parameters
    }


def _decay_only(mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    results = []
    for zero in ZERO_STAGES:
        parameters = toys.given(
            {"matrix": torch.ones(7, 5), "norm": torch.ones(5), "bias": torch.ones(3), "m": torch.ones(1, 1)}
        )
        buckets = GradientBuckets(parameters, mesh, zero=zero)
        buckets.finish()
        ShardedAdamW(buckets, weight_decay=0.1).step(0.5)
        results.append({name: parameter.detach() for name, parameter, _ in parameters})
    return results


@RANKS
def test_with_zero_gradients_only_matrices_move_in_any_sharding(ranks: int) -> None:
    for result in _results(ranks)["_decay_only"]:
        for values in result:
            torch.testing.assert_close(values["matrix"], torch.full((7, 5), 0.95))
            torch.testing.assert_close(values["m"], torch.full((1, 1), 0.95))
            assert (values["norm"] == 1).all() and (values["bias"] == 1).all()


def _hundred_bf16_steps(mesh: Mesh) -> list[dict[str, tuple[float, float]]]:
    """Return, for each ZeRO stage, (value, value of the main parameter) of two parameters after 100 steps from 1."""
    results = []
    for zero in ZERO_STAGES:
        ones = torch.ones(20, dtype=torch.bfloat16)
        parameters = toys.given({"decayed": ones, "pushed": ones}, {"decayed": True, "pushed": False})
        buckets = GradientBuckets(parameters, mesh, zero=zero)
        optimizer = ShardedAdamW(buckets, weight_decay=1.0)
        for _ in range(100):
            buckets.zero_grad()
            toys.backward_of(parameters, {"pushed": torch.ones(20)})
            buckets.finish()
            optimizer.step(6e-4)
            for bucket in buckets.buckets:
                assert torch.equal(bucket.parameters[bucket.kept], bucket.main_params.bfloat16())
        values = {}
        for name, parameter, _ in parameters:
            assert same_on_all(parameter, mesh.dp) and (parameter == parameter[0]).all()
            main = [piece.tensors["main_param"][0].item() for piece in optimizer.pieces(name)]
            values[name] = (parameter[0].item(), *main)
        results.append(values)
    return results


@RANKS
def test_bf16_parameters_move_by_steps_smaller_than_their_precision(ranks: int) -> None:
    # Decay multiplies by 1 - 6e-4 each step; a gradient that is always the same moves by the rate each step.
    right = {"decayed": (1 - 6e-4) ** 100, "pushed": 1 - 100 * 6e-4}
    for result in _results(ranks)["_hundred_bf16_steps"]:
        for values in result:
            for name, (value, *main) in values.items():
                assert value == pytest.approx(0.94, abs=2e-3)
                assert main == [pytest.approx(right[name], rel=1e-5)] * len(main)


def test_main_parameters_follow_loaded_weights() -> None:
    parameters = toys.given({"weight": torch.ones(4, 4, dtype=torch.bfloat16)})
    buckets = GradientBuckets(parameters, toys.alone())
    parameters[0][1].detach().fill_(3.0)
    buckets.adopt_parameters()
    buckets.spread_parameters()
    assert (parameters[0][1] == 3).all()


def _tied(mesh: Mesh) -> tuple[list[float], list[float], bool]:
    """An embedding on the first and the last of two stages, dp 2: local gradients 1, 2 (first stage), 3, 4 (last).

    Each is the gradient of a dp rank's mean loss. The trainer divides the summed loss by the weight of the whole step,
    twice that of a rank here, so that what arrives in the buckets is half of each and the sum over the four holders is the
    mean over dp of the sums over stages: (1 + 3 + 2 + 4) / 2 = 5.
    """
    sums, norms, equal = [], [], True
    for zero in ZERO_STAGES:
        facts = ParameterFacts((4, 8), replicas=Replicas(stages=(0, 1)))
        own = f"layer{mesh.pp_rank}"
        parameters = [
            ("embed_tokens", nn.Parameter(torch.ones(4, 8)), facts),
            (own, nn.Parameter(torch.ones(4, 8)), ParameterFacts((4, 8))),
        ]
        buckets = GradientBuckets(parameters, mesh, zero=zero)
        optimizer = ShardedAdamW(buckets)
        noise = torch.Generator().manual_seed(mesh.rank)
        for step in range(10):
            buckets.zero_grad()
            buckets.expect_last_backward()
            local = torch.full((4, 8), 1.0 + mesh.rank) if step == 0 else torch.randn(4, 8, generator=noise)
            toys.backward_of(parameters, {"embed_tokens": local / 2, own: torch.zeros(4, 8)})
            buckets.finish()
            if step == 0:
                if zero == 0:  # ZeRO 1 has the sum at its owner only
                    sums.append(parameters[0][1].main_grad[0, 0].item())
                norms.append(all_reduce_(local_squared_norm(buckets), mesh.world).sqrt().item())
            toys.poison(buckets)
            optimizer.step(1e-2)
        equal = equal and same_on_all(parameters[0][1], mesh.world)
    return sums, norms, equal


def test_an_embedding_tied_across_stages_is_one_parameter() -> None:
    for sums, norms, equal in run_layout(Layout(pp=2, dp=2), _tied):
        assert sums == [5.0]
        assert norms == [pytest.approx(5 * 32**0.5)] * len(ZERO_STAGES), "counted once, not by each of its four holders"
        assert equal, "copies differ after ten steps"


def test_a_clip_coefficient_multiplies_the_gradients() -> None:
    results = []
    for factor, coefficient in ((1.0, torch.tensor(0.25, dtype=torch.float64)), (0.25, None)):
        parameters = toys.given(_values(), DECAYS)
        buckets = GradientBuckets(parameters, toys.alone())
        optimizer = ShardedAdamW(buckets, **SETTINGS)
        toys.backward_of(parameters, {name: factor * gradient for name, gradient in _gradients(0, 0).items()})
        buckets.finish()
        optimizer.step(1e-2, coefficient)
        results.append([optimizer.pieces(name) for name in SHAPES])
    for clipped, small in zip(*results, strict=True):
        for piece, other in zip(clipped, small, strict=True):
            assert torch.equal(piece.tensors["exp_avg"], other.tensors["exp_avg"])


def test_the_optimizer_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from torch import nn; from tests.data_parallel import toys;"
        "from parallax.data_parallel.optimizer import ShardedAdamW;"
        "b = toys.buckets_of(nn.Linear(2, 2), toys.alone()); b.finish(); ShardedAdamW(b).step(1e-3);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0

"""Buckets of a model of one's own: what they cannot be made of is told, and a step that was given up leaves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from parallax.collectives import all_reduce_
from parallax.data_parallel import GradientBuckets, ShardedAdamW, local_squared_norm
from parallax.mesh import Layout, Mesh
from parallax.tensor_parallel.facts import ParameterFacts, named_parameters_with_facts
from parallax.tensor_parallel.scopes import around
from tests.data_parallel import toys
from tests.distributed.harness import run_layout, run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(batch).square().sum()


class _Trouble(Exception):
    pass


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise _Trouble


def _give_up_after_backward(model: nn.Module, buckets: GradientBuckets, rank: int) -> None:
    """A step that is dropped when its last backward, and its reductions, have run."""
    buckets.zero_grad()
    buckets.expect_last_backward()
    buckets.before_backward()
    (1e3 * _loss(model, rank, 99)).backward()
    buckets.after_backward()


def _give_up_in_backward(model: nn.Module, buckets: GradientBuckets, rank: int) -> None:
    """A step whose backward raises an error half way, on all ranks alike."""
    buckets.zero_grad()
    buckets.expect_last_backward()
    buckets.before_backward()
    hook = model[0].register_forward_hook(lambda module, inputs, output: _Fails.apply(output))
    with pytest.raises(_Trouble):
        (1e3 * _loss(model, rank, 99)).backward()
    hook.remove()


Trouble = Callable[[nn.Module, GradientBuckets, int], None]


def _norms(mesh: Mesh, zero: int, trouble: Trouble | None) -> list[float]:
    """Three steps, each after one that was given up."""
    model = _model()
    scopes = [around(name, part) for name, part in model.named_children() if list(part.parameters())]
    buckets = GradientBuckets(named_parameters_with_facts(model), mesh, zero=zero, bucket_elements=40, scopes=[scopes])
    optimizer = ShardedAdamW(buckets)
    norms = []
    for step in range(3):
        if trouble is not None:
            trouble(model, buckets, mesh.rank)
        buckets.zero_grad()
        buckets.expect_last_backward()
        buckets.before_backward()
        _loss(model, mesh.rank, step).backward()
        buckets.after_backward()
        buckets.finish()
        norms.append(all_reduce_(local_squared_norm(buckets), mesh.world).item())
        optimizer.step(1e-2)
    return norms


def _given_up(mesh: Mesh) -> list[tuple[str, list[float], list[float]]]:
    over_sockets = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
    return [
        (f"{where} zero {zero} {trouble.__name__}", _norms(ranks, zero, None), _norms(ranks, zero, trouble))
        for where, ranks in (("shared memory", mesh), ("gloo", over_sockets))
        for zero in (0, 1, 2, 3)
        for trouble in (_give_up_after_backward, _give_up_in_backward)
    ]


def test_a_step_that_was_given_up_leaves_nothing_in_the_next() -> None:
    for result in run_layout(Layout(dp=2), _given_up):
        assert len(result) == 16
        for name, plain, after_trouble in result:
            assert after_trouble == plain, name


def _loaded_while_on_the_way(mesh: Mesh) -> list[bool]:
    """Load values when an update has been sent and not waited for; return whether they stay, in fp32 and in bf16."""
    over_sockets = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
    stay = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(8)
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600)).to(dtype)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        scopes = [around(name, part) for name, part in model.named_children()]
        named = named_parameters_with_facts(model)
        buckets = GradientBuckets(named, over_sockets, zero=1, scopes=[scopes], overlap_gather=True)
        optimizer = ShardedAdamW(buckets, weight_decay=0.0)
        for step in range(2):
            buckets.zero_grad()
            buckets.expect_last_backward()
            model(torch.ones(2, 600, dtype=dtype)).sum().backward()
            buckets.finish()
            optimizer.step(1e-2 * (1 - step))  # the second changes nothing: it brings back what it holds
            buckets.arrive()
            if not step:
                model.load_state_dict(saved)
                buckets.adopt_parameters()
        stay.append(all(torch.equal(value, saved[name]) for name, value in model.state_dict().items()))
    return stay


def test_values_that_are_loaded_after_an_update_has_arrived_stay() -> None:
    assert run_layout(Layout(dp=2), _loaded_while_on_the_way) == [[True, True]] * 2


FACTS = ParameterFacts((2, 3))


def _one_name_twice() -> None:
    GradientBuckets([("weight", nn.Parameter(torch.ones(2, 3)), FACTS) for _ in range(2)], toys.alone())


def _two_names_for_one() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    GradientBuckets([("first", parameter, FACTS), ("second", parameter, FACTS)], toys.alone())


def _two_buckets() -> None:
    model = _model()
    for _ in range(2):
        GradientBuckets(named_parameters_with_facts(model), toys.alone())


def _no_such_stage() -> None:
    GradientBuckets(named_parameters_with_facts(_model()), toys.alone(), zero=4)


def _no_such_group() -> None:
    mesh = Mesh(Layout(dp=4), 0, torch.device("cpu"))
    GradientBuckets(named_parameters_with_facts(_model()), mesh, zero_group=3)


def _no_scope() -> None:
    model = _model()
    scopes = [around("first", model[0])]
    GradientBuckets(named_parameters_with_facts(model), toys.alone(), scopes=[scopes], overlap_gather=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_one_name_twice, "two parameters are called weight"),
        (_two_names_for_one, "first and second are one parameter"),
        (_two_buckets, "0.weight is in other GradientBuckets already"),
        (_no_such_stage, "there is no ZeRO stage 4; zero is 0, 1, 2, 3"),
        (_no_such_group, "zero_group 3 does not divide the 4 ranks of dp"),
        (_no_scope, "2.weight is in none of `scopes`"),
    ],
)
def test_what_buckets_cannot_be_made_of_is_told(make: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "change", [lambda model: model.double(), lambda model: model[2].requires_grad_(False)], ids=["cast", "frozen"]
)
def test_a_parameter_that_changes_after_its_bucket_was_made_is_told(change: Callable[[nn.Module], None]) -> None:
    model = _model()
    buckets = GradientBuckets(named_parameters_with_facts(model), toys.alone())
    buckets.zero_grad()
    change(model)
    with pytest.raises(
        RuntimeError, match=r"(0|2)\.weight was frozen, cast or moved after its GradientBuckets were made"
    ):
        buckets.zero_grad()


def test_gradients_are_used_only_once_they_are_summed() -> None:
    model = _model()
    buckets = GradientBuckets(named_parameters_with_facts(model), toys.alone())
    optimizer = ShardedAdamW(buckets)
    for use in (lambda: optimizer.step(1e-3), lambda: local_squared_norm(buckets)):
        buckets.zero_grad()
        buckets.expect_last_backward()
        _loss(model, 0, 0).backward()
        with pytest.raises(RuntimeError, match="comes after finish"):
            use()
        buckets.finish()
        use()


def test_a_second_step_without_zero_grad_is_told() -> None:
    model = _model()
    buckets = GradientBuckets(named_parameters_with_facts(model), toys.alone())
    buckets.expect_last_backward()
    _loss(model, 0, 0).backward()
    buckets.finish()
    with pytest.raises(RuntimeError, match="call zero_grad"):
        _loss(model, 0, 1).backward()


def _frozen_on_one(mesh: Mesh) -> str:
    model = _model().requires_grad_(mesh.rank == 0)
    try:
        GradientBuckets(named_parameters_with_facts(model), mesh)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_trains_nothing_is_told_by_all() -> None:
    assert all("ranks 0, 1 hold the same parameters" in told for told in run_ranks(2, _frozen_on_one))

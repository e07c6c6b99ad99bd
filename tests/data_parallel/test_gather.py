"""ZeRO 3: parameters are there while they are used, the next ones already, and nothing else."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.optimizer import ShardedAdamW
from parallax.mesh import Mesh
from parallax.tensor_parallel.facts import named_parameters_with_facts
from parallax.tensor_parallel.scopes import ParameterScope, around
from tests.data_parallel import toys
from tests.distributed.harness import run_ranks

LAYERS, WIDTH = 4, 24


class _Watch(torch.autograd.Function):
    """Notes which layers' parameters are whole, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Any) -> torch.Tensor:
        ctx.note = note
        note("forward")
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note("backward")
        return gradient, None


class _Layers(nn.Module):
    """Layers in scopes of their own; `seen` gets (layer, direction, which layers were whole)."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.recompute = recompute
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scopes = [ParameterScope(f"layer{i}", layer.parameters) for i, layer in enumerate(self.layers)]
        self.seen: list[tuple[int, str, list[int]]] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number, (layer, scope) in enumerate(zip(self.layers, self.scopes, strict=True)):
            hidden = scope.entered(hidden)
            body = functools.partial(self._body, number, layer)
            hidden = checkpoint(body, hidden, use_reentrant=False) if self.recompute else body(hidden)
            hidden = scope.left(hidden)
        return hidden

    def _body(self, number: int, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return _Watch.apply(torch.tanh(layer(hidden)), lambda direction: self._note(number, direction))

    def _note(self, number: int, direction: str) -> None:
        whole = [i for i, layer in enumerate(self.layers) if layer.weight.untyped_storage().nbytes()]
        self.seen.append((number, direction, whole))


def _step(module: nn.Module, buckets: GradientBuckets, rank: int, number: int) -> None:
    batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    buckets.before_backward()
    module(batch).square().sum().backward()
    buckets.after_backward()


def _presence(mesh: Mesh) -> list:
    module = _Layers()
    buckets = GradientBuckets(named_parameters_with_facts(module), mesh, zero=3, scopes=[module.scopes])
    buckets.zero_grad()
    _step(module, buckets, mesh.rank, 0)
    buckets.finish()
    module._note(-1, "after")
    return module.seen


def _trained(mesh: Mesh, zero: int, recompute: bool, frozen: int) -> dict[str, torch.Tensor]:
    """Three steps of two backwards each; the first `frozen` layers are not trained. Evaluates between steps."""
    module = _Layers(recompute)
    for layer in module.layers[:frozen]:
        layer.requires_grad_(False)
    buckets = GradientBuckets(named_parameters_with_facts(module), mesh, zero=zero, scopes=[module.scopes])
    optimizer = ShardedAdamW(buckets)
    outputs = []
    for step in range(3):
        buckets.zero_grad()
        for number in range(2):
            if number == 1:
                buckets.expect_last_backward()
            _step(module, buckets, mesh.rank, 2 * step + number)
        buckets.finish()
        optimizer.step(1e-2)
        with torch.no_grad():
            outputs.append(module(torch.ones(1, WIDTH)))
    module._note(-1, "after")
    return {"outputs": torch.stack(outputs), "left": torch.tensor(module.seen[-1][2])}


def _own_model(mesh: Mesh, zero: int) -> torch.Tensor:
    """A model without scopes of its own."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 8))
    scopes = [around(name, part) for name, part in module.named_children() if list(part.parameters())]
    buckets = GradientBuckets(named_parameters_with_facts(module), mesh, zero=zero, scopes=[scopes])
    optimizer = ShardedAdamW(buckets)
    for step in range(3):
        buckets.zero_grad()
        buckets.expect_last_backward()
        _step(module, buckets, mesh.rank, step)
        buckets.finish()
        optimizer.step(1e-2)
    return module(torch.ones(1, WIDTH)).detach()


class _Recomputed(nn.Module):
    """A layer in torch's own checkpoint, which ends a recomputation as soon as it has what it needs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, hidden, use_reentrant=False)


class _Embedded(nn.Module):
    """A part that takes token ids, and whose product reads its weight in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids))


class _Masked(nn.Module):
    """A part whose first input is a number that no gradient passes by, and that is called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, mask: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.where(mask > 0, self.layer(hidden), hidden)


def _odd_model(mesh: Mesh, zero: int) -> tuple[torch.Tensor, int]:
    """Return what a model of such parts has learned, and the bytes of parameters that are there between steps."""
    torch.manual_seed(6)
    first, second = _Embedded(), nn.Linear(WIDTH, WIDTH)
    third = _Masked()
    module = nn.Sequential(first, _Recomputed(second), nn.Tanh())
    everything = nn.ModuleList([module, third])
    scopes = [around("first", first), around("second", second), around("third", third)]
    buckets = GradientBuckets(named_parameters_with_facts(everything), mesh, zero=zero, scopes=[scopes])
    optimizer = ShardedAdamW(buckets)
    ids = torch.arange(6).view(2, 3) + mesh.rank
    for _ in range(3):
        for wrong in (lambda: module(ids.new_full((2, 3), 10_000)), lambda: third()):  # leaves nothing in use
            with suppress(IndexError, TypeError):
                wrong()
        buckets.zero_grad()
        for last in (False, True):
            if last:
                buckets.expect_last_backward()
            buckets.before_backward()
            third(mask=torch.ones(WIDTH), hidden=module(ids)).square().sum().backward()
            buckets.after_backward()
        buckets.finish()
        optimizer.step(1e-2)
    here = sum(parameter.untyped_storage().nbytes() for parameter in everything.parameters())
    return module(ids % 3).detach(), here


def _all(mesh: Mesh) -> dict[str, Any]:
    return {
        "presence": _presence(mesh),
        "trained": {
            (recompute, frozen): [_trained(mesh, zero, recompute, frozen) for zero in (1, 3)]
            for recompute in (False, True)
            for frozen in (0, 2)
        },
        "own": [_own_model(mesh, zero) for zero in (1, 3)],
        "odd": [_odd_model(mesh, zero) for zero in (1, 3)],
    }


@functools.cache
def _results() -> list[dict[str, Any]]:
    return run_ranks(2, _all)


def test_a_layer_is_whole_in_its_own_turn_and_the_one_before_it_in_order() -> None:
    forward = [(i, "forward", [i, i + 1] if i + 1 < LAYERS else [i]) for i in range(LAYERS)]
    backward = [(i, "backward", [i - 1, i] if i else [i]) for i in reversed(range(LAYERS))]
    for result in _results():
        assert result["presence"] == [*forward, *backward, (-1, "after", [])]


def test_training_equals_that_with_whole_parameters_with_recomputation_and_frozen_layers() -> None:
    for result in _results():
        for (recompute, frozen), (whole, sharded) in result["trained"].items():
            torch.testing.assert_close(sharded["outputs"], whole["outputs"], rtol=1e-6, atol=1e-6)
            assert sharded["left"].tolist() == list(range(frozen)), (recompute, frozen, "frozen layers stay whole")


def test_modules_of_other_models_are_sharded_by_hooks_around_their_calls() -> None:
    for result in _results():
        torch.testing.assert_close(*result["own"], rtol=1e-6, atol=1e-6)


def test_parts_that_take_ids_are_recomputed_by_torch_or_fail_are_there_no_longer_than_they_are_used() -> None:
    for result in _results():
        (whole, _), (sharded, here) = result["odd"]
        torch.testing.assert_close(sharded, whole, rtol=1e-6, atol=1e-6)
        assert here == 0


def test_a_scope_without_a_keeper_is_the_identity() -> None:
    scope = ParameterScope("part", list)
    tensor = torch.ones(2, requires_grad=True)
    assert scope.entered(tensor) is tensor and scope.left(tensor) is tensor


def test_parameters_of_one_rank_alone_are_never_taken_away() -> None:
    module = _Layers()
    GradientBuckets(named_parameters_with_facts(module), toys.alone(), zero=3, scopes=[module.scopes])
    module(torch.ones(1, WIDTH)).sum().backward()
    assert all(whole == list(range(LAYERS)) for _, _, whole in module.seen)


def _read_between_steps(mesh: Mesh) -> list[str]:
    module = _Layers()
    buckets = GradientBuckets(named_parameters_with_facts(module), mesh, zero=3, scopes=[module.scopes])
    buckets.zero_grad()
    told = []
    for _ in range(2):  # before the first use and after it
        weight = module.layers[0].weight
        assert weight.shape == (WIDTH, WIDTH) and weight.requires_grad and weight.grad is None
        assert repr(weight) == f"AbsentParameter(layers.0.weight, [{WIDTH}, {WIDTH}], torch.float32)"
        for read in (
            torch.sum,
            torch.clone,
            lambda weight: weight * 2,
            lambda weight: weight.data,
            nn.Module.state_dict,
        ):
            try:
                read(module if read is nn.Module.state_dict else weight)
            except RuntimeError as error:
                told.append(str(error))
        _step(module, buckets, mesh.rank, 0)
    buckets.finish()
    return told


def test_reading_a_parameter_that_is_not_here_is_an_error_that_says_so() -> None:
    for told in run_ranks(2, _read_between_steps):
        assert len(told) == 10, told
        assert all("layers.0.weight was read (" in error and "between its uses" in error for error in told)

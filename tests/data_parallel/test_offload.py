"""Optimizer states on the host: the same bits as on the device, however late the copies are made.

There is no second device here; `Late` stands for one. It makes each copy as late as a stream may: one that is waited for at the
wait, the others only when a later one needs them done. Until then its targets are poisoned, and a source that is
overwritten too early is copied as it is by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import parallax.data_parallel.optimizer as optimizer_module
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.offload import Offloaded
from parallax.data_parallel.optimizer import ShardedOptimizer
from parallax.data_parallel.rules import SGD, AdamW, Rule
from parallax.mesh import Layout, Mesh
from parallax.tensor_parallel.facts import named_parameters_with_facts
from tests.distributed.harness import run_layout

RULES: dict[str, Rule] = {"adamw": AdamW(), "sgd": SGD()}


class Late:
    """Copies that are made as late as may be, in order."""

    def __init__(self) -> None:
        self.queue: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self.done = self.most_waiting = 0

    def begin(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after_computing: bool) -> Any:
        if not after_computing:
            # What was begun before this copy is done before it: its targets may be what an earlier one reads.
            self._make(self.done + len(self.queue))
            for target in targets:
                target.fill_(math.nan)
        self.queue.append((list(targets), list(sources)))
        self.most_waiting = max(self.most_waiting, len(self.queue))
        return self.done + len(self.queue)

    def wait(self, copies: int) -> None:
        self._make(copies)

    def finish(self) -> None:
        self._make(self.done + len(self.queue))

    def _make(self, up_to: int) -> None:
        while self.done < up_to:
            targets, sources = self.queue.pop(0)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            self.done += 1


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 7), nn.LayerNorm(7)).to(dtype)


def _trained(
    mesh: Mesh, rule: str, dtype: torch.dtype, zero: int, moments: torch.dtype | None, late: Late | None
) -> dict:
    model = _model(dtype)
    named = list(named_parameters_with_facts(model))
    buckets = GradientBuckets(named, mesh, zero=zero, bucket_elements=800, rule=lambda facts: rule)
    optimizer = ShardedOptimizer(buckets, {rule: RULES[rule]}, moments, late)
    input = torch.linspace(-1, 1, 4 * 24).view(4, 24).to(dtype) + mesh.rank
    for step in range(4):
        buckets.zero_grad()
        buckets.expect_last_backward()
        buckets.before_backward()
        model(input).square().sum().backward()
        buckets.after_backward()
        buckets.finish()
        skip = torch.tensor(1.0 if step == 1 else 0.0)
        optimizer.step(1e-2, torch.tensor(0.5, dtype=torch.float64), skip)
    result = {name: parameter.detach().clone() for name, parameter, _ in named}
    for name, _, _ in named:
        for piece in optimizer.pieces(name):
            for kind, tensor in piece.tensors.items():
                # Pieces of regions that are cut up finer are put together again by where they lie.
                place = result.setdefault(f"{name} {kind}", torch.full((5000,), math.inf, dtype=tensor.dtype))
                place[piece.start : piece.stop] = tensor
    return result


def _both(mesh: Mesh, small: int) -> list[tuple[tuple, dict, dict]]:
    optimizer_module.REGION_ELEMENTS = small
    results = []
    for rule in RULES:
        for dtype in (torch.float32, torch.bfloat16):
            for zero in (0, 1, 2):
                for moments in (None, torch.bfloat16):
                    case = rule, dtype, zero, moments
                    late = Late()
                    results.append((case, _trained(mesh, *case, None), _trained(mesh, *case, late)))
                    assert late.most_waiting >= 2, "copies of several regions are under way at once"
    return results


@pytest.mark.parametrize("dp", [1, 2])
def test_offloaded_states_give_the_same_bits_however_late_they_are_copied(dp: int) -> None:
    for rank in run_layout(Layout(dp=dp), _both, 112):
        for case, kept, offloaded in rank:
            assert kept.keys() == offloaded.keys()
            for name, tensor in kept.items():
                assert torch.equal(tensor, offloaded[name]), (case, name)


def test_two_regions_at_a_time_are_on_the_device() -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    model = _model(torch.bfloat16)
    buckets = GradientBuckets(named_parameters_with_facts(model), mesh)
    late = Late()
    optimizer = ShardedOptimizer(buckets, {"adamw": AdamW()}, offload=late)
    model(torch.ones(1, 24, dtype=torch.bfloat16)).sum().backward()
    buckets.finish()
    optimizer.step(1e-3)
    (rule,) = optimizer._rules.values()
    assert isinstance(rule, Offloaded)
    largest = max(region.stop - region.start for region in optimizer._regions["adamw"])
    on_device = sum(
        tensor.numel() for buffers in rule._buffers for tensor in (*buffers.states.values(), buffers.main_param)
    )
    assert on_device == 2 * 3 * largest

"""When a gradient is complete, whatever way it comes; one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.flat import Bucket
from parallax.tensor_parallel.linear import column_parallel
from tests.data_parallel import toys

IDS = torch.tensor([[1, 2, 2, 5]])


class Tied(nn.Module):
    """The embedding is the head's weight as well: one gradient comes from autograd, one through the sink."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.embedding = nn.Parameter(torch.randn(6, 4))
        self.middle = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = F.embedding(ids, self.embedding)
        if self.recompute:
            hidden = checkpoint(self._middle, hidden, use_reentrant=False)
        else:
            hidden = self._middle(hidden)
        return column_parallel(hidden, [self.embedding], [None], None)[0]

    def _middle(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = column_parallel(hidden, [self.embedding[:4]], [None], None)[0]
        return torch.tanh(self.middle(column_parallel(hidden, [self.middle.weight], [None], None)[0]))


def record_starts(buckets: GradientBuckets, log: list) -> None:
    """Note (names of the bucket, its gradient) in `log` when its reduction starts."""
    for bucket in buckets.buckets:
        start = bucket.close

        def recorded(bucket: Bucket = bucket, start: object = start) -> None:
            log.append(([place.name for place in bucket.plan.places], bucket.main_grad.clone()))
            start()  # type: ignore[operator]

        bucket.close = recorded  # type: ignore[method-assign]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_reduction_starts_after_every_use_of_a_tied_weight_has_contributed(recompute: bool) -> None:
    plain, bucketed = Tied(recompute), Tied(recompute)
    plain(IDS).square().sum().backward()
    buckets = toys.buckets_of(bucketed, toys.alone(), bucket_elements=1)
    log: list = []
    record_starts(buckets, log)
    buckets.expect_last_backward()
    bucketed(IDS).square().sum().backward()
    assert [names for names, _ in log] == [["middle.bias"], ["middle.weight"], ["embedding"]]
    buckets.finish()
    assert len(log) == 3
    for (_, at_start), parameter in zip(log, (plain.middle.bias, plain.middle.weight, plain.embedding), strict=True):
        torch.testing.assert_close(at_start[: parameter.numel()], parameter.grad.flatten(), rtol=1e-6, atol=1e-6)
    assert all(parameter.grad is None for parameter in bucketed.parameters())


def test_only_the_last_micro_batch_starts_reductions() -> None:
    module = toys.model()
    buckets = toys.buckets_of(module, toys.alone())
    log: list = []
    record_starts(buckets, log)
    for index, batch in enumerate(toys.micro_batches(0, 3)):
        if index == 2:
            assert not log
            buckets.expect_last_backward()
        toys.loss(module, [batch]).backward()
    plan = [[place.name for place in bucket.plan.places] for bucket in buckets.buckets]
    started = [names for names, _ in log]
    assert "unused" in plan[-1] and started == plan[:-1], "a bucket with an unused parameter waits for finish()"
    buckets.finish()
    assert [names for names, _ in log] == plan


def test_buckets_start_in_the_order_of_the_plan_whatever_order_they_are_completed_in() -> None:
    parameters = toys.given({name: torch.ones(16) for name in ("first", "second", "third")})
    buckets = GradientBuckets(parameters, toys.alone(), bucket_elements=16)
    log: list = []
    record_starts(buckets, log)
    buckets.expect_last_backward()
    started = []
    for name in ("first", "third", "second"):
        toys.backward_of(parameters, {name: torch.ones(16)})
        started.append([names for names, _ in log])
    assert started == [[], [["third"]], [["third"], ["second"], ["first"]]]


def test_each_stage_of_a_rank_announces_its_own_last_backward() -> None:
    parameters = toys.given({"stage0": torch.ones(16), "stage2": torch.ones(16)})
    stages = {0: [parameters[0][1]], 2: [parameters[1][1]]}
    buckets = GradientBuckets(parameters, toys.alone(), bucket_elements=16, stages=stages)
    log: list = []
    record_starts(buckets, log)
    buckets.expect_last_backward(2)
    toys.backward_of(parameters, {"stage0": torch.ones(16)})
    toys.backward_of(parameters, {"stage2": torch.ones(16)})
    assert [names for names, _ in log] == [["stage2"]]
    buckets.expect_last_backward(0)
    toys.backward_of(parameters, {"stage0": torch.ones(16)})
    assert [(names, gradient.tolist()) for names, gradient in log[1:]] == [(["stage0"], [2.0] * 16)]


def test_a_gradient_that_comes_after_the_reduction_has_begun_is_an_error() -> None:
    module = toys.model()
    buckets = toys.buckets_of(module, toys.alone())
    (batch,) = toys.micro_batches(0, 1)
    toys.loss(module, [batch]).backward()
    buckets.finish()
    with pytest.raises(RuntimeError, match="arrived after its bucket's reduction"):
        toys.loss(module, [batch]).backward()
    buckets.zero_grad()
    toys.loss(module, [batch]).backward()


def test_micro_batches_of_bf16_are_summed_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    bias = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    module = nn.Module()
    module.register_parameter("weight", weight)
    module.register_parameter("bias", bias)
    buckets = toys.buckets_of(module, toys.alone())
    for _ in range(300):
        column_parallel(torch.ones(1, 1, 1, dtype=torch.bfloat16), [weight], [bias], None)[0].sum().backward()
    # A bf16 sum would stay at 256, where adding 1 is rounded away.
    assert [bucket.main_grad[:1].item() for bucket in buckets.buckets] == [300.0]
    assert weight.main_grad.item() == bias.main_grad.item() == 300.0

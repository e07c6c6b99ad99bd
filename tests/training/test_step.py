"""One step means the same however it is cut: targets are counted over the whole step, before any gradient."""

from __future__ import annotations

import pytest
import torch

from parallax.mesh import Layout, Mesh
from parallax.objectives.masked_next_token import MaskedNextToken
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL, Case, build

# Targets of each of four samples of sixteen tokens: a mean of means would weigh them alike.
TARGETS = (1, 9, 16, 3)


def _samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, SMALL.vocab_size, (4, 17), generator=generator)
    labels = ids[:, 1:].clone()
    for row, count in enumerate(TARGETS):
        labels[row, : 16 - count] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def _step(mesh: Mesh, micro_batch: int) -> dict:
    """Loss, gradient norm and the updated parameters of one step on the four samples."""
    step = build(mesh, Case(micro_batch=micro_batch, global_batch=4))
    count = 4 // micro_batch // mesh.layout.dp
    rows = [slice((m * mesh.layout.dp + mesh.dp_rank) * micro_batch, None) for m in range(count)]
    batches = [{name: t[row][:micro_batch] for name, t in _samples().items()} for row in rows]
    result = step(batches, 1e-2)
    weights = {name: parameter.detach().clone() for name, parameter, _ in step.parameters}
    return {
        "loss": result.loss.item(),
        "norm": result.grad_norm.item(),
        "weight": result.weight.item(),
        "weights": weights,
    }


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(pp=2), Layout(dp=2, pp=2)], ids=str)
def test_samples_with_few_targets_do_not_count_more(layout: Layout) -> None:
    (whole,) = run_layout(Layout(), _step, 4)
    assert whole["weight"] == sum(TARGETS)
    for micro_batch in (1, 2):
        for got in run_layout(layout, _step, micro_batch):
            assert got["weight"] == sum(TARGETS)
            assert got["loss"] == pytest.approx(whole["loss"], rel=1e-6)
            assert got["norm"] == pytest.approx(whole["norm"], rel=1e-6)
            for name, tensor in got["weights"].items():
                assert torch.allclose(tensor, whole["weights"][name], rtol=1e-4, atol=1e-6), name


def _weighted_step(mesh: Mesh, scale: float) -> tuple[float, float, float]:
    """Loss, gradient norm and weight of a step whose targets count 1, 2, 3 and 4 times `scale`, sample by sample."""
    step = build(mesh, Case(micro_batch=1, global_batch=4))
    step.runner.objective = MaskedNextToken(SMALL.vocab_size, mesh.tp)
    samples = _samples()
    samples["weights"] = scale * torch.arange(1.0, 5.0)[:, None].expand(4, 16)
    mine = range(mesh.dp_rank, 4, mesh.layout.dp)
    result = step([{name: tensor[i : i + 1] for name, tensor in samples.items()} for i in mine], 1e-2)
    return result.loss.item(), result.grad_norm.item(), result.weight.item()


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(pp=2)], ids=str)
def test_weights_count_by_their_ratios_however_small_they_are(layout: Layout) -> None:
    (whole,) = run_layout(Layout(), _weighted_step, 1.0)
    assert whole[2] == sum(count * (row + 1) for row, count in enumerate(TARGETS))
    for got in run_layout(layout, _weighted_step, 1e-4):
        assert got[2] == pytest.approx(1e-4 * whole[2], rel=1e-6) and got[2] < 1
        assert got[:2] == pytest.approx(whole[:2], rel=1e-5)


def test_the_logged_loss_is_the_mean_over_all_targets() -> None:
    (got,) = run_layout(Layout(), _loss_by_hand)
    assert got[0] == pytest.approx(got[1], rel=1e-6)


def _loss_by_hand(mesh: Mesh) -> tuple[float, float]:
    step = build(mesh, Case(micro_batch=1, global_batch=4))
    samples = _samples()
    with torch.no_grad():
        logits = step.runner.stages[0](samples["input_ids"])[..., : SMALL.vocab_size]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten())
    batches = [{name: tensor[i : i + 1] for name, tensor in samples.items()} for i in range(4)]
    return step(batches, 1e-2).loss.item(), expected.item()

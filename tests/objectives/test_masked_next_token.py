"""The loss of chats: what it counts, whatever rows and micro-batches the samples lie in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallax.data.packing import RowDataset, make_row
from parallax.objectives.masked_next_token import MaskedNextToken
from parallax.objectives.next_token import NextToken
from tests.data.test_packing import Lists

VOCABULARY = 64  # a multiple of what vocabularies are padded to


def logits_with_losses(losses: list[float], labels: torch.Tensor) -> torch.Tensor:
    """Return logits `[1, seq, 64]` of a vocabulary of two whose cross-entropy at each position is the one asked for."""
    right = -torch.tensor(losses)  # log of the label's probability
    wrong = torch.log1p(-right.exp())
    columns = torch.stack([torch.where(labels == 0, right, wrong), torch.where(labels == 0, wrong, right)], -1)
    return F.pad(columns, (0, 62)).unsqueeze(0)


def mean_over(batches: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> float:
    objective = MaskedNextToken(2)
    results = [objective.loss(logits, batch) for logits, batch in batches]
    return float(sum(loss for loss, _ in results) / sum(weight for _, weight in results))


def one_and_three(per_sample: bool) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    batches = []
    for losses, labels in (([4.0, 9.0, 9.0], [1, -100, -100]), ([1.0, 1.0, 1.0], [0, 1, 0])):
        tensor = torch.tensor(labels)
        batch = {"labels": tensor.unsqueeze(0)}
        if per_sample:
            batch["weights"] = (tensor != -100).float().unsqueeze(0) / (tensor != -100).sum()
        batches.append((logits_with_losses(losses, tensor), batch))
    return batches


def test_one_token_of_loss_4_and_three_of_loss_1_give_1_75() -> None:
    """Fault 1: not the mean of the micro-batches' means, which is 2.5."""
    assert mean_over(one_and_three(per_sample=False)) == pytest.approx(1.75, abs=1e-6)


def test_counted_per_sample_they_give_2_5() -> None:
    assert mean_over(one_and_three(per_sample=True)) == pytest.approx(2.5, abs=1e-6)


def test_without_weights_it_is_next_token_prediction() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, VOCABULARY)
    labels = torch.tensor([[1, -100, 3, 0, -100], [-100, -100, -100, 6, 2]])
    for ours, theirs in zip(
        MaskedNextToken(VOCABULARY).loss(logits, {"labels": labels}),
        NextToken(VOCABULARY).loss(logits, {"labels": labels}),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_weights_multiply_losses_and_are_counted() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4, VOCABULARY, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 3, 0], [2, 5, -100, 6]])
    weights = torch.tensor([[0.5, 3.0, 2.0, 1.0], [0.25, 1.0, 7.0, 0.125]])
    loss, weight = MaskedNextToken(VOCABULARY).loss(logits, {"labels": labels, "weights": weights})
    expected = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction="none").view(2, 4)
    assert loss.item() == pytest.approx((expected * weights * (labels != -100)).sum().item(), rel=1e-6)
    assert weight.item() == 0.5 + 2 + 1 + 0.25 + 1 + 0.125


def test_a_batch_in_which_nothing_is_learned_weighs_nothing_and_is_no_nan() -> None:
    """Fault 32."""
    logits = torch.randn(1, 3, VOCABULARY, requires_grad=True)
    for batch in ({}, {"weights": torch.zeros(1, 3)}):
        loss, weight = MaskedNextToken(VOCABULARY).loss(logits, {"labels": torch.full((1, 3), -100), **batch})
        loss.backward()
        assert loss.item() == 0 and weight.item() == 0
        assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


class PerDocument(nn.Module):
    """A model that sees what a packed row promises: a token, those before it in its document, and its position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.place = nn.Embedding(64, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.embed(batch["input_ids"]) + self.place(batch["positions"])
        documents, order = batch["documents"], torch.arange(batch["documents"].shape[-1])
        sees = (documents[:, :, None] == documents[:, None, :]) & (order[:, None] >= order[None, :])
        mean = sees.float() / sees.sum(-1, keepdim=True)
        return self.head(torch.tanh(mean @ hidden)).double()


def batch_of(rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


def samples(has_weights: bool) -> Lists:
    random = np.random.RandomState(0)
    made = []
    for _ in range(30):
        length = random.randint(2, 20)
        weights = random.choice([0.0, 0.5, 2.0] if has_weights else [0.0, 1.0], length)
        weights[-1] = 1.0
        made.append((random.randint(0, VOCABULARY, length).tolist(), weights.tolist()))
    return Lists(made, has_weights)


def totals(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[float, float, torch.Tensor]:
    """Return the loss of a step over `batches`, its weight, and the gradient."""
    model.zero_grad()
    objective = MaskedNextToken(VOCABULARY)
    results = [objective.loss(model(batch), batch) for batch in batches]
    loss, weight = sum(loss for loss, _ in results), sum(float(weight) for _, weight in results)
    (loss / weight).backward()
    return loss.item(), weight, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("has_weights", [False, True])
def test_the_loss_of_packs_is_the_sum_of_the_samples_alone_in_any_micro_batches(has_weights: bool) -> None:
    model, data = PerDocument(), samples(has_weights)
    alone = [batch_of([make_row([data[i]], len(data[i][0]), 0, has_weights)]) for i in range(30)]
    reference = totals(model, alone)
    for packing, seq_len in ((True, 20), (True, 37), (False, 20), (False, 64)):
        dataset = RowDataset(data, seq_len, padding_id=3, packing=packing)
        rows = [dataset[i] for i in range(len(dataset))]
        for size in (1, 4, len(rows)):
            found = totals(model, [batch_of(rows[i : i + size]) for i in range(0, len(rows), size)])
            assert found[0] == pytest.approx(reference[0], rel=1e-6) and found[1] == pytest.approx(
                reference[1], rel=1e-6
            )
            torch.testing.assert_close(found[2], reference[2], rtol=1e-5, atol=1e-6)

"""The cross-entropy kernel against its reference, in Triton's interpreter; test_under_interpreter.py runs this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallax.kernels.cross_entropy import kernel, reference
from parallax.tensor_parallel.vocabulary import IGNORE_INDEX, vocab_parallel_cross_entropy
from tests.kernels.cases import assert_near, dtypes, poisoned, random, sizes
from tests.kernels.interpreted.pretend import on_gpu, plain, spy

PADDING = 7


def make_logits(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits of some spread, with columns of padding that turn whatever reads them into NaN."""
    logits = 4 * random(rows, columns + PADDING, dtype=dtype)
    logits[:, columns:] = torch.nan
    return logits


def make_targets(rows: int, columns: int) -> torch.Tensor:
    """Return targets of which some lie before, in the padding of, and beyond this rank's columns."""
    targets = torch.arange(rows) * 7 % columns
    elsewhere = torch.tensor([-1, columns, columns + PADDING, IGNORE_INDEX])
    targets[1::3] = elsewhere[torch.arange(len(targets[1::3])) % 4]
    return targets


@sizes
@dtypes
def test_forward_equals_the_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    logits, targets = make_logits(rows, columns, dtype), make_targets(rows, columns)
    with poisoned():
        result = kernel.cross_entropy_forward(logits, targets, columns)
    for each, expected in zip(result, reference.cross_entropy_forward(logits, targets, columns), strict=True):
        assert_near(each, expected)


@sizes
@dtypes
def test_backward_equals_the_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    logits, targets = make_logits(rows, columns, dtype), make_targets(rows, columns)
    log_sum, _ = reference.cross_entropy_forward(logits, targets, columns)
    log_sum, scale = log_sum + 0.5, random(rows, seed=1)  # other ranks' columns make the sum greater
    with poisoned():
        gradient = kernel.cross_entropy_backward(logits, targets, log_sum, scale, columns)
    assert_near(gradient, reference.cross_entropy_backward(logits, targets, log_sum, scale, columns))
    assert not gradient[:, columns:].any()


def test_a_row_of_many_blocks_is_one_sum() -> None:
    columns = 2 * kernel.MAX_BLOCK + 5
    # Rising values: every block finds a new greatest; falling ones: the first block holds it.
    rising = torch.linspace(-80.0, 80.0, columns)
    logits, targets = torch.stack([rising, -rising]), torch.tensor([columns - 1, 5])
    log_sum, target = kernel.cross_entropy_forward(logits, targets, columns)
    expected, expected_target = reference.cross_entropy_forward(logits, targets, columns)
    assert_near(log_sum, expected)
    assert torch.equal(target, expected_target)
    gradient = kernel.cross_entropy_backward(logits, targets, log_sum, torch.ones(2), columns)
    assert_near(gradient, reference.cross_entropy_backward(logits, targets, expected, torch.ones(2), columns))


def test_columns_of_minus_infinity_have_probability_zero() -> None:
    columns = kernel.MAX_BLOCK + 3
    logits = torch.full((2, columns), -torch.inf)
    logits[0, -1] = 2.0  # found in the second block, after a first that holds nothing
    log_sum, _ = kernel.cross_entropy_forward(logits, torch.tensor([0, 0]), columns)
    assert torch.equal(log_sum, torch.tensor([2.0, -torch.inf]))
    gradient = kernel.cross_entropy_backward(logits[:1], torch.tensor([-1]), log_sum[:1], torch.ones(1), columns)
    assert gradient[0, -1] == 1 and gradient.sum() == 1


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("others", [0.0, 1000.0, -1000.0, -torch.inf])
def test_a_plus_infinite_logit_makes_the_sum_infinite_in_whichever_block_it_is(block: int, others: float) -> None:
    columns = 2 * kernel.MAX_BLOCK + 5
    logits = others + random(2, columns)
    logits[0, block * kernel.MAX_BLOCK + 2] = torch.inf
    logits[1, :3] = torch.inf
    logits[1, 7] = 3.4e38
    targets = torch.tensor([5, 2])
    log_sum, target = kernel.cross_entropy_forward(logits, targets, columns)
    assert torch.equal(log_sum, torch.full((2,), torch.inf))
    assert torch.equal(target, reference.cross_entropy_forward(logits, targets, columns)[1])
    gradient = kernel.cross_entropy_backward(logits, targets, log_sum, torch.ones(2), columns)
    expected = reference.cross_entropy_backward(logits, targets, log_sum, torch.ones(2), columns)
    torch.testing.assert_close(gradient, expected, equal_nan=True)


def test_a_nan_logit_makes_the_loss_nan() -> None:
    logits = random(1, 1000)
    logits[0, 500] = torch.nan
    assert kernel.cross_entropy_forward(logits, torch.tensor([0]), 1000)[0].isnan().all()


def test_a_rank_that_holds_only_padding_adds_nothing() -> None:
    logits, targets = torch.full((3, 64), torch.nan), torch.tensor([-5, 0, 63])
    log_sum, target = kernel.cross_entropy_forward(logits, targets, 0)
    assert torch.equal(log_sum, torch.full((3,), -torch.inf)) and not target.any()
    gradient = kernel.cross_entropy_backward(logits, targets, torch.ones(3), torch.ones(3), 0)
    assert torch.equal(gradient, torch.zeros(3, 64))


def test_rows_beyond_two_to_the_31_elements_are_found(tmp_path: Path) -> None:
    # A sparse file: only the pages that are read exist. Row 2 starts at element 2^31.
    width, columns = 2**30, 64
    file = tmp_path / "logits"
    with file.open("wb") as sparse:
        sparse.truncate(3 * width * 2)
    logits = torch.from_file(str(file), shared=True, size=3 * width, dtype=torch.float16).view(3, width)
    logits[:, :columns] = random(3, columns, dtype=torch.float16)
    targets = torch.tensor([1, 2, 3])
    log_sum, target = kernel.cross_entropy_forward(logits, targets, columns)
    expected, expected_target = reference.cross_entropy_forward(logits, targets, columns)
    assert_near(log_sum, expected)
    assert torch.equal(target, expected_target)


def test_arguments_that_do_not_fit_are_refused() -> None:
    logits, targets = random(4, 64), torch.arange(4)
    with pytest.raises(ValueError, match=r"logits is not contiguous .*logits.contiguous\(\)"):
        kernel.cross_entropy_forward(random(64, 4).t(), targets, 64)
    with pytest.raises(ValueError, match=r"targets is torch.int32; this kernel takes torch.int64"):
        kernel.cross_entropy_forward(logits, targets.int(), 64)
    with pytest.raises(ValueError, match=r"targets has the shape \[3\], but the other arguments make it \[4\]"):
        kernel.cross_entropy_forward(logits, targets[:3], 64)
    with pytest.raises(ValueError, match="columns=65 must be between 0 and the width of the logits, 64"):
        kernel.cross_entropy_forward(logits, targets, 65)
    with pytest.raises(ValueError, match="scale is not contiguous"):
        kernel.cross_entropy_backward(logits, targets, torch.ones(4), torch.ones(1).expand(4), 64)


def test_the_loss_calls_the_kernel_for_a_tensor_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy(monkeypatch, kernel, "cross_entropy_forward", "cross_entropy_backward")
    logits, labels = make_logits(12, 121, torch.float32).view(3, 4, 128), (torch.arange(12) * 7 % 121).view(4, 3).t()
    labels[1, 2] = IGNORE_INDEX
    here, there = logits.clone().requires_grad_(), on_gpu(logits).requires_grad_()
    expected = vocab_parallel_cross_entropy(here, labels, vocab_size=121)
    expected.sum().backward()
    assert calls == []
    result = vocab_parallel_cross_entropy(there, labels, vocab_size=121)
    assert_near(plain(result), expected.detach())
    result.sum().backward()
    assert calls == ["cross_entropy_forward", "cross_entropy_backward"]
    assert_near(plain(there.grad), here.grad)

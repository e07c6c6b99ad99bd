"""AdamW's kernel against its reference and torch's own, in Triton's interpreter; test_under_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from parallax.data_parallel.rules import AdamW, Region, Update
from parallax.kernels.adamw import kernel, reference
from tests.kernels.cases import random
from tests.kernels.interpreted.pretend import on_gpu, plain, spy

CHOICES = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def test_five_steps_are_those_of_torch() -> None:
    count, clip = kernel.BLOCK + 7, torch.tensor(0.5)
    weight = torch.nn.Parameter(random(count))
    main_param, exp_avg, exp_avg_sq = weight.detach().clone(), torch.zeros(count), torch.zeros(count)
    torchs = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    steps = torch.zeros(())
    for seed in range(1, 6):
        gradient = random(count, seed=seed)
        weight.grad = gradient * clip
        torchs.step()
        kernel.adamw_(main_param, gradient, exp_avg, exp_avg_sq, None, steps, clip, **CHOICES)
    assert steps.item() == 5
    torch.testing.assert_close(main_param, weight.detach(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("count", [1, 5, kernel.BLOCK, 3 * kernel.BLOCK + 1])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16], ids=str)
def test_moments_and_the_rounded_copy_equal_the_reference(
    count: int, moments: torch.dtype, copy: torch.dtype | None
) -> None:
    results = []
    for module in (kernel, reference):
        main_param, gradient = random(count), random(count, seed=1, dtype=torch.bfloat16)
        exp_avg, exp_avg_sq = random(count, seed=2).to(moments), random(count, seed=3).abs().to(moments)
        parameter = None if copy is None else torch.full((count,), torch.nan, dtype=copy)
        state = main_param, gradient, exp_avg, exp_avg_sq, parameter
        module.adamw_(*state, torch.tensor(6.0), torch.tensor(0.3), **CHOICES)
        results.append([tensor for tensor in state if tensor is not None])
    for one, expected in zip(*results, strict=True):
        # The interpreter cuts bf16 off where a GPU rounds.
        tolerance = 2e-6 if one.dtype == torch.float32 else 2 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, expected, rtol=tolerance, atol=1e-6)


def test_a_skipped_update_changes_nothing() -> None:
    state = [random(1000, seed=seed) for seed in range(4)]
    before, steps = [tensor.clone() for tensor in state], torch.tensor(3.0)
    state[1][5] = torch.nan
    kernel.adamw_(*state, None, steps, None, torch.tensor(1.0), **CHOICES)
    assert steps.item() == 3
    for index in (0, 2, 3):
        assert torch.equal(state[index], before[index])


def test_the_optimizer_calls_the_kernel_for_buckets_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy(monkeypatch, kernel, "adamw_")
    results = []
    for place in (torch.clone, on_gpu):
        for moments in (torch.float32, torch.bfloat16):
            main_param, gradient = place(random(3000)), place(torch.zeros(3000))
            states = {name: place(torch.zeros(3000, dtype=moments)) for name in AdamW.states}
            region = Region(None, 0, 3000, True, main_param, gradient, states, place(torch.zeros(())))
            for seed in range(3):
                gradient.copy_(random(3000, seed=seed))  # torch's kernel writes the clipped gradient back
                AdamW().update([region], Update(1e-2, place(torch.tensor(0.5, dtype=torch.float64)), None))
            results.append([plain(tensor) for tensor in (main_param, *states.values(), region.step)])
    assert calls == ["adamw_"] * 6
    for one, two in zip(results[:2], results[2:], strict=True):
        for left, right in zip(one, two, strict=True):
            narrow = left.dtype == torch.bfloat16 or len({tensor.dtype for tensor in one}) > 1
            torch.testing.assert_close(right, left, rtol=2e-2 if narrow else 2e-6, atol=1e-3 if narrow else 1e-6)


def test_arguments_that_do_not_fit_are_refused() -> None:
    flat, steps = torch.zeros(8), torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"main_param is torch\.bfloat16"):
        kernel.adamw_(flat.bfloat16(), flat, flat, flat, None, steps, **CHOICES)
    with pytest.raises(ValueError, match=r"exp_avg has the shape \[4\]"):
        kernel.adamw_(flat, flat, flat[:4], flat, None, steps, **CHOICES)

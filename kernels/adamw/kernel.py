"""AdamW on a flat buffer (Loshchilov and Hutter 2019, arXiv:1711.05101): one read and one write of everything.

Clipping, both moments, weight decay, the fp32 main parameter and the model's rounded copy are one pass. torch's fused AdamW
needs a second one for the copy, and keeps moments in the parameter's type only; here they are fp32 or bf16. Whether the update
is to be skipped, and how many have been made, is read on the device, so that nothing waits for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from parallax.kernels.launch import FLOATING, OPTIONS, check, on_device_of, tl, triton

BLOCK = 1024  # elements a program: 8 a thread of 4 warps, of five buffers
WARPS = 4


@triton.jit
def _adamw(
    main_param,
    gradient,
    exp_avg,
    exp_avg_sq,
    parameter,
    step,
    clip,
    skip,
    count,
    learning_rate,
    decay,
    beta1,
    beta2,
    log_beta1,
    log_beta2,
    eps,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = start + lane < tl.where(tl.load(skip) == 0.0, count, 0)
    steps = tl.load(step) + 1.0
    inverse1 = 1.0 / (1.0 - tl.math.exp2(log_beta1 * steps))
    inverse2 = 1.0 / (1.0 - tl.math.exp2(log_beta2 * steps))
    scaled = tl.load(gradient + start + lane, mask=mask, other=0.0).to(tl.float32) * tl.load(clip)
    first = tl.load(exp_avg + start + lane, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(exp_avg_sq + start + lane, mask=mask, other=0.0).to(tl.float32)
    first += (scaled - first) * (1.0 - beta1)
    second = second * beta2 + scaled * scaled * (1.0 - beta2)
    root = tl.math.sqrt_rn(second * inverse2) + eps
    value = tl.load(main_param + start + lane, mask=mask, other=0.0) * decay
    value -= learning_rate * tl.math.div_rn(first * inverse1, root)
    tl.store(main_param + start + lane, value, mask=mask)
    tl.store(exp_avg + start + lane, first.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + start + lane, second.to(exp_avg_sq.dtype.element_ty), mask=mask)
    if COPY:
        tl.store(parameter + start + lane, value.to(parameter.dtype.element_ty), mask=mask)


def adamw_(
    main_param: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    parameter: torch.Tensor | None,
    step: torch.Tensor,
    clip: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update in place: the fp32 main parameter, its moments, the model's parameter, a rounded copy, and `step`.

    The first five are flat `[n]`, contiguous: the main parameter in fp32, the others in fp32, bf16 or fp16; parameter: None
    where the main parameter is the model's own. The next three are fp32 scalars on the device. step: the updates made so far.
    clip: multiplies the gradient; None for 1. skip: where it is not 0 nothing is changed; None for 0.
    Raises ValueError for other arguments.
    """
    where: dict[str, Any] = {"shape": main_param.shape, "device": main_param.device}
    check("main_param", main_param, (torch.float32,))
    check("gradient", gradient, FLOATING, **where)
    check("exp_avg", exp_avg, FLOATING, **where)
    check("exp_avg_sq", exp_avg_sq, FLOATING, **where)
    if parameter is not None:
        check("parameter", parameter, FLOATING, **where)
    clip = torch.ones((), device=main_param.device) if clip is None else clip
    skip = torch.zeros((), device=main_param.device) if skip is None else skip
    for name, scalar in (("step", step), ("clip", clip), ("skip", skip)):
        check(name, scalar, (torch.float32,), shape=(), device=main_param.device)
    if main_param.numel():
        with on_device_of(main_param, _adamw):
            _adamw[(triton.cdiv(main_param.numel(), BLOCK),)](
                main_param,
                gradient,
                exp_avg,
                exp_avg_sq,
                main_param if parameter is None else parameter,
                step,
                clip,
                skip,
                main_param.numel(),
                learning_rate,
                1.0 - learning_rate * weight_decay,
                beta1,
                beta2,
                math.log2(beta1) if beta1 else -math.inf,
                math.log2(beta2) if beta2 else -math.inf,
                eps,
                COPY=parameter is not None,
                BLOCK=BLOCK,
                num_warps=WARPS,
                **OPTIONS,
            )
    step += (skip == 0).float()

"""AdamW on a flat buffer (Loshchilov and Hutter 2019, arXiv:1711.05101): one read and one write of everything.

Clipping, both moments, weight decay, the fp32 main parameter and the model's rounded copy are one pass. torch's fused AdamW
needs a second one for the copy, and keeps moments in the parameter's type only; here they are fp32 or bf16.
"""

from __future__ import annotations

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
    clip,
    count,
    learning_rate,
    decay,
    beta1,
    beta2,
    eps,
    inverse1,
    inverse2,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = start + lane < count
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
    clip: torch.Tensor,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update in place: the fp32 main parameter, its moments, and the model's parameter, a rounded copy.

    All flat `[n]`, contiguous. gradient: fp32 or bf16. exp_avg, exp_avg_sq: fp32 or bf16. parameter: None where the main
    parameter is the model's own. clip: fp32 scalar that multiplies the gradient, on the device. step: counted from 1.
    Raises ValueError for other arguments.
    """
    where: dict[str, Any] = {"shape": main_param.shape, "device": main_param.device}
    check("main_param", main_param, (torch.float32,))
    check("gradient", gradient, FLOATING, **where)
    check("exp_avg", exp_avg, FLOATING, **where)
    check("exp_avg_sq", exp_avg_sq, FLOATING, **where)
    check("clip", clip, (torch.float32,), shape=(), device=main_param.device)
    if parameter is not None:
        check("parameter", parameter, FLOATING, **where)
    if not main_param.numel():
        return
    with on_device_of(main_param, _adamw):
        _adamw[(triton.cdiv(main_param.numel(), BLOCK),)](
            main_param,
            gradient,
            exp_avg,
            exp_avg_sq,
            main_param if parameter is None else parameter,
            clip,
            main_param.numel(),
            learning_rate,
            1.0 - learning_rate * weight_decay,
            beta1,
            beta2,
            eps,
            1.0 / (1.0 - beta1**step),
            1.0 / (1.0 - beta2**step),
            COPY=parameter is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **OPTIONS,
        )

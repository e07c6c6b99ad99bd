"""AdamW on a flat buffer in plain PyTorch (Loshchilov and Hutter 2019, arXiv:1711.05101): what the kernel beside it computes."""

from __future__ import annotations

import torch


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
    """Update in place: the fp32 main parameter, its moments (fp32 or bf16), the model's parameter, a rounded copy, and step."""
    if skip is not None and skip != 0:
        return
    step += 1
    scaled = gradient.float() if clip is None else gradient.float() * clip
    first = exp_avg.float().lerp(scaled, 1 - beta1)
    second = exp_avg_sq.float() * beta2 + (1 - beta2) * scaled * scaled
    root = (second / (1 - beta2 ** step.item())).sqrt() + eps
    change = learning_rate * (first / (1 - beta1 ** step.item())) / root
    main_param.mul_(1 - learning_rate * weight_decay).sub_(change)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if parameter is not None:
        parameter.copy_(main_param)

"""The learning rate as a function of the step: linear warm-up, then one of four shapes.

    cosine    half a cosine from lr to min_lr (Loshchilov and Hutter 2017, arXiv:1608.03983)
    linear    a straight line from lr to min_lr
    constant  lr
    wsd       lr, then a straight line to min_lr over the last fifth: warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)

Step s counts from 0. Warm-up gives lr * (s + 1) / (warmup_steps + 1), so that no step is spent on a rate of 0 and lr is reached
at step warmup_steps. From lr_decay_steps on the rate is min_lr. A pure function of the step: a resumed run goes on where the
unbroken one would be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from parallax.flags import named

WSD_DECAY_FRACTION = 0.2  # of lr_decay_steps; 10 to 20% is enough (Hagele et al. 2024, arXiv:2405.18392)
DEFAULT_WARMUP_FRACTION, MAX_DEFAULT_WARMUP = 0.1, 2000
# The best rate falls as 1 / width (Yang et al. 2022, arXiv:2203.03466); 1 / hidden_size is 2.4e-4 for Llama 3 8B and 6.1e-5 for
# 405B, which were trained with 3e-4 and 8e-5 (Llama Team 2024, arXiv:2407.21783, table 3).
DEFAULT_LR_TIMES_HIDDEN = 1.0
# For narrow models that is too much: with the preset tiny and 2048 tokens a step, losses at 1e-3 are lower, and runs that differ in
# their rounding alone stay within 0.4% of each other, where at 3.9e-3 they are up to 5% apart (docs/fp8.md).
MAX_DEFAULT_LR = 1e-3
# A tenth of it to fine-tune, so that what the weights know is not lost: 2.4e-5 for the width of Llama 2 7B, 6.1e-6 for Llama 3
# 405B; they were fine-tuned with 2e-5 (Touvron et al. 2023, arXiv:2307.09288, section 3.1) and 1e-5 (Llama Team, section 4.1.3).
FINETUNE_LR_TIMES_HIDDEN = 0.1
DEFAULT_LR_OVER_MIN_LR = 10  # Hoffmann et al. 2022, arXiv:2203.15556; Brown et al. 2020


@dataclass(frozen=True)
class LearningRateOptions:
    """How far each step goes, and how that changes over the run."""

    lr: Annotated[float | None, named("lr", metavar="FLOAT", default="1 / hidden size, at most 0.001")] = None
    """Learning rate after the warm-up."""

    lr_schedule: Annotated[Literal["cosine", "linear", "constant", "wsd"], named("lr-schedule", "lr-decay-style")] = (
        "cosine"
    )
    """Shape after the warm-up; wsd stays at --lr and decays linearly over the last fifth of --lr-decay-steps."""

    min_lr: Annotated[float | None, named("min-lr", metavar="FLOAT", default="a tenth of --lr")] = None
    """Learning rate at the end of the decay, and after it."""

    warmup_steps: Annotated[
        int | None,
        named(
            "warmup-steps",
            "lr-warmup-iters",
            metavar="INT",
            default="a tenth of --lr-decay-steps, from 10 to 2000, but at most a third",
        ),
    ] = None
    """Steps in which the rate rises linearly to --lr."""

    lr_decay_steps: Annotated[
        int | None, named("lr-decay-steps", "lr-decay-iters", metavar="INT", default="the steps of the run")
    ] = None
    """Step, warm-up included, at which the decay ends."""

    LR_TIMES_HIDDEN: ClassVar[float] = DEFAULT_LR_TIMES_HIDDEN
    MAX_LR: ClassVar[float] = MAX_DEFAULT_LR

    def default_lr(self, hidden_size: int) -> float:
        """Return the rate for a model that wide where none is asked for."""
        return min(self.LR_TIMES_HIDDEN / hidden_size, self.MAX_LR)

    def check(self, steps: int, hidden_size: int | None) -> list[str]:
        """Return what is wrong with these options in a run of `steps` steps, a sentence each.

        hidden_size: of the model, or None while it is not known.
        """
        problems = []
        lr = self.lr or (self.default_lr(hidden_size) if hidden_size else None)
        if self.lr is not None and self.lr <= 0:
            problems.append(f"--lr {self.lr} must be above 0")
        elif lr is not None and self.min_lr is not None and not 0 <= self.min_lr <= lr:
            problems.append(f"--min-lr {self.min_lr} must be between 0 and --lr {lr}")
        if self.warmup_steps is not None and not 0 <= self.warmup_steps <= steps:
            problems.append(f"--warmup-steps {self.warmup_steps} must be between 0 and the {steps} steps of the run")
        if self.lr_schedule == "constant":
            problems += [
                f"--{name} has no effect with --lr-schedule constant; leave it out or use cosine, linear or wsd"
                for name, value in (("min-lr", self.min_lr), ("lr-decay-steps", self.lr_decay_steps))
                if value is not None
            ]
        elif self.lr_decay_steps is not None and self.lr_decay_steps < max(1, self.warmup_steps or 0):
            least = f"--warmup-steps {self.warmup_steps}" if self.warmup_steps else "1"
            problems.append(f"--lr-decay-steps {self.lr_decay_steps} must be at least {least}")
        return problems

    def resolved(self, steps: int, hidden_size: int) -> LearningRateOptions:
        """Return these options with the defaults of a run of `steps` steps of a model that wide filled in."""
        decay = steps if self.lr_decay_steps is None else self.lr_decay_steps
        # At least 10 steps, since AdamW's first moments are rough, but no more than a third of a very short run.
        warmup = min(max(int(DEFAULT_WARMUP_FRACTION * decay), min(10, decay // 3)), MAX_DEFAULT_WARMUP)
        filled = replace(
            self,
            lr=self.default_lr(hidden_size) if self.lr is None else self.lr,
            warmup_steps=warmup if self.warmup_steps is None else self.warmup_steps,
        )
        assert filled.lr is not None
        if self.lr_schedule == "constant":
            return filled
        min_lr = filled.lr / DEFAULT_LR_OVER_MIN_LR if self.min_lr is None else self.min_lr
        return replace(filled, min_lr=min_lr, lr_decay_steps=decay)


@dataclass(frozen=True)
class FinetuneLearningRateOptions(LearningRateOptions):
    """How far each step goes, and how that changes over the run."""

    lr: Annotated[float | None, named("lr", metavar="FLOAT", default="0.1 / hidden size")] = None
    """Learning rate after the warm-up."""

    LR_TIMES_HIDDEN: ClassVar[float] = FINETUNE_LR_TIMES_HIDDEN
    MAX_LR: ClassVar[float] = math.inf


def learning_rate(step: int, options: LearningRateOptions) -> float:
    """Return the learning rate of `step`, counted from 0; `options` are resolved."""
    warmup = options.warmup_steps
    assert warmup is not None and options.lr is not None, "learning_rate needs resolved options"
    if step < warmup:
        return options.lr * (step + 1) / (warmup + 1)
    if options.lr_schedule == "constant":
        return options.lr
    end, min_lr = options.lr_decay_steps, options.min_lr
    assert end is not None and min_lr is not None, "learning_rate needs resolved options"
    if step >= end:
        return min_lr
    start = max(warmup, end - round(WSD_DECAY_FRACTION * end)) if options.lr_schedule == "wsd" else warmup
    progress = max(0, step - start) / max(1, end - start)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if options.lr_schedule == "cosine" else 1 - progress
    return min_lr + share * (options.lr - min_lr)

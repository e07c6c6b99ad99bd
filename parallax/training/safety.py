"""What keeps a run from being lost: which checkpoints stay, when it stops by itself, and what it does about bad numbers.

Options only; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from parallax.flags import named

OnBadStep = Literal["skip", "abort", "rollback"]


@dataclass(frozen=True)
class SafetyOptions:
    """What keeps a run from being lost."""

    keep: int = 0
    """Checkpoints to keep, the newest ones; 0 keeps all."""

    keep_every: Annotated[int, named("keep-every", metavar="STEPS")] = 0
    """Keep also, for good, every checkpoint of a step that is a multiple of this; 0: none beside the newest."""

    sync_save: bool = False
    """Stop training until a checkpoint is on the disk, instead of for the copy in memory only; needs less memory."""

    exit_after: Annotated[
        float | None, named("exit-after", "exit-duration-in-mins", metavar="MINUTES", default="no limit")
    ] = None
    """Save and exit with status 3 when training has taken this long."""

    on_bad_step: OnBadStep = "abort"
    """A step whose loss or gradient norm is no number, or a spike, never changes the weights. After it: go on with the next
    (skip), stop (abort), or go back to the newest checkpoint and on with the data after that step (rollback)."""

    spike_factor: Annotated[float | None, named("spike-factor", metavar="FACTOR", default="no limit")] = None
    """A loss above this many times the running mean of the losses makes a bad step."""

    max_bad_steps: int = 10
    """Bad steps in a row, or rollbacks to one checkpoint, after which the run stops whatever --on-bad-step says."""

    def check(self, save_every: int) -> list[str]:
        """Return what is wrong with these options, a sentence each. save_every: steps between checkpoints."""
        problems = [
            f"--{name} {value} must be 0, which turns it off, or more"
            for name, value in (("keep", self.keep), ("keep-every", self.keep_every))
            if value < 0
        ]
        if self.keep_every and not self.keep:
            problems.append(
                f"--keep-every {self.keep_every} has no effect without --keep, which is how many others stay"
            )
        if self.keep_every > 0 and save_every > 0 and self.keep_every % save_every:
            problems.append(f"--keep-every {self.keep_every} must be a multiple of --save-every {save_every}")
        if self.exit_after is not None and self.exit_after <= 0:
            problems.append(f"--exit-after {self.exit_after} must be above 0 minutes")
        if self.spike_factor is not None and self.spike_factor <= 1:
            problems.append(f"--spike-factor {self.spike_factor} must be above 1, since 1 is the mean of the losses")
        if self.max_bad_steps < 1:
            problems.append(f"--max-bad-steps {self.max_bad_steps} must be at least 1")
        if self.on_bad_step == "rollback" and save_every == 0:
            problems.append("--on-bad-step rollback needs checkpoints to go back to; give --save-every too")
        return problems

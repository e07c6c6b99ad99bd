"""The schedules by name, each a pure function (num_stages, num_micro_batches) -> Schedule; adding one is adding a line.

With one stage each of them is gradient accumulation: a pipeline of length one.
"""

from __future__ import annotations

from collections.abc import Callable

from parallax.pipeline.actions import Schedule
from parallax.pipeline.schedules.forward_only import forward_only
from parallax.pipeline.schedules.gpipe import gpipe
from parallax.pipeline.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}

__all__ = ["SCHEDULES", "forward_only", "gpipe", "one_f_one_b"]

"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallax.mesh import Mesh

_SIZES = (512, 1024, 2048)  # rows and columns of square products; the best counts
_ATTEMPTS = 12


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, cores, load, versions and the date, as they are now."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "load": round(os.getloadavg()[0], 1),  # processes that wanted to run, over the last minute
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        fields = dict(
            line.split(":", 1) for line in information.read_text(encoding="utf-8").splitlines() if ":" in line
        )
        described = {name.strip(): value.strip() for name, value in fields.items()}
        if "model name" in described:
            instructions = [name for name in ("avx2", "avx512f", "amx_tile") if name in described.get("flags", "")]
            return f"{described['model name']} ({', '.join(instructions)})"
    return platform.processor() or platform.machine()


def products_peak(mesh: Mesh) -> float:
    """Return the FLOP/s of square fp32 matrix products on all ranks at once, by the clock on the wall; called by all ranks.

    Each rank's best product counts; of ranks that share cores, as much as there are cores.
    """
    import torch

    from parallax.collectives import all_reduce_, barrier

    share = min(1.0, usable_cores() / (mesh.layout.world_size * torch.get_num_threads()))
    barrier(mesh.world)
    best = 0.0
    for size in _SIZES:
        left, right, result = (torch.ones(size, size) for _ in range(3))
        for _ in range(_ATTEMPTS):
            started = time.perf_counter()
            torch.mm(left, right, out=result)
            best = max(best, 2.0 * size**3 / (time.perf_counter() - started))
    return float(all_reduce_(torch.tensor(best * share, dtype=torch.float64), mesh.world))

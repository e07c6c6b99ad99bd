"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, cores, load, versions and the date, as they are now."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 1),  # processes that wanted to run, over the last minute
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


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

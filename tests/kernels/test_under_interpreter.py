"""Run the checks of interpreted/ in processes of their own.

Triton decides while it is imported whether it interprets, and the tests beside this one need it to compile; and a kernel
that reads far out of its bounds takes the process with it. To work on one kernel:

    TRITON_INTERPRET=1 pytest -n 0 tests/kernels/interpreted/check_rms_norm.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "operator", ["rms_norm", "swiglu", "cross_entropy", "fp8_quantize", "fp8_gemm", "fp8_backend", "adamw"]
)
def test_the_kernel_equals_its_reference(operator: str) -> None:
    checks = ROOT / "tests" / "kernels" / "interpreted" / f"check_{operator}.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "--tb", "short", str(checks)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]

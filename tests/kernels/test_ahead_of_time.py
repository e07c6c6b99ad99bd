"""Compile every kernel for the GPUs it is meant for, without one: does it compile, do its values fit in registers?

What this cannot show: speed, and whether the machine code is right; tests/gpu/ does that, on a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton", reason="needs triton: pip install 'parallax-lm[gpu]'")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set, so triton does not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from parallax.kernels.cross_entropy import kernel as cross_entropy  # noqa: E402
from parallax.kernels.launch import OPTIONS  # noqa: E402
from parallax.kernels.rms_norm import kernel as rms_norm  # noqa: E402
from parallax.kernels.swiglu import kernel as swiglu  # noqa: E402

# Compute capabilities: A100, H100, B200; the shared memory that a program may have there, in bytes (CUDA programming guide).
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


class Case(NamedTuple):
    """A kernel, the types of its arguments (pointers by what they point to), its compile-time values and its warps."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, int]
    warps: int


def rms_norm_case(kernel: Any, columns: int, dtype: str) -> Case:
    plan = rms_norm.tiling(columns, 2 if dtype == "bf16" else 4)
    types = dict.fromkeys(("gradient", "input", "weight", "output", "grad_input"), f"*{dtype}")
    types |= {"inverse": "*fp32", "partial": "*fp32", "rows": "i32", "columns": "i32", "tiles": "i32", "eps": "fp32"}
    return Case(kernel, types, {"ROWS": plan.rows, "BLOCK": plan.block, "BLOCKS": plan.blocks}, plan.warps)


def swiglu_case(kernel: Any, count: str, dtype: str) -> Case:
    types = dict.fromkeys(("gradient", "gate", "up", "output", "grad_gate", "grad_up"), f"*{dtype}") | {"count": count}
    return Case(kernel, types, {"BLOCK": swiglu.BLOCK}, swiglu.WARPS)


def cross_entropy_case(kernel: Any, width: int, dtype: str) -> Case:
    block, warps = cross_entropy.block_and_warps(width)
    types = {"logits": f"*{dtype}", "gradient": f"*{dtype}", "targets": "*i64", "width": "i32", "columns": "i32"}
    types |= dict.fromkeys(("log_sum", "target_logit", "scale"), "*fp32")
    return Case(kernel, types, {"BLOCK": block}, warps)


CASES = {
    f"{kernel.__name__}-{size}-{dtype}": make(kernel, size, dtype)
    for make, kernel, sizes in (
        # A query head, hidden sizes of common models, and one that several programs share.
        (rms_norm_case, rms_norm._rms_norm_forward, (128, 4096, 8192, 16384)),
        (rms_norm_case, rms_norm._rms_norm_backward, (128, 4096, 8192, 16384)),
        (swiglu_case, swiglu._swiglu_forward, ("i32", "i64")),
        (swiglu_case, swiglu._swiglu_backward, ("i32", "i64")),
        (cross_entropy_case, cross_entropy._cross_entropy_forward, (64, 128256)),
        (cross_entropy_case, cross_entropy._cross_entropy_backward, (64, 128256)),
    )
    for size in sizes
    for dtype in ("bf16", "fp32")
}


def compile_for(case: Case, capability: int) -> Any:
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    # As a launch finds it: torch aligns its memory to more than 16 bytes, and common sizes divide by 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(case.kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": case.warps, **OPTIONS}
    )


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return how much memory a thread of the machine code needs for what does not fit in its registers."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    arguments = [program, "-res-usage", folder / "kernel.cubin"]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", run.stdout).group(1))


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_compiles_without_spilling_registers(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compiled = compile_for(CASES[name], capability)
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("name", [name for name in CASES if "bf16" in name])
def test_addresses_are_computed_in_64_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rows * columns of a long step is more than 2^31, so a program widens its number before it does anything with it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    code = compile_for(CASES[name], 90).asm["ttir"]
    numbers = re.findall(r"(%\w+) = tt.get_program_id x", code)
    assert len(numbers) == 1
    uses = [line for line in code.splitlines() if re.search(rf"{numbers[0]}\b(?! =)", line)]
    assert uses and all("arith.extsi" in use and "to i64" in use for use in uses), uses

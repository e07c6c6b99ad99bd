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

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set, so triton does not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from parallax.kernels.adamw import kernel as adamw  # noqa: E402
from parallax.kernels.cross_entropy import kernel as cross_entropy  # noqa: E402
from parallax.kernels.fp8_gemm import kernel as fp8_gemm  # noqa: E402
from parallax.kernels.fp8_quantize import kernel as fp8_quantize  # noqa: E402
from parallax.kernels.launch import OPTIONS  # noqa: E402
from parallax.kernels.rms_norm import kernel as rms_norm  # noqa: E402
from parallax.kernels.swiglu import kernel as swiglu  # noqa: E402

# Compute capabilities: A100, H100, B200; the shared memory that a program may have there, in bytes (CUDA programming guide).
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


class Case(NamedTuple):
    """A kernel, the types of its arguments (pointers by what they point to), its compile-time values and its warps."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3


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


def quantize_case(kind: str, fp8_format: str) -> Case:
    types = dict.fromkeys(("x", "up"), "*bf16") | dict.fromkeys(("q", "q_transposed"), "*u8")
    types |= dict.fromkeys(("scale_inv", "scale_inv_transposed"), "*fp32") | {"rows": "i32", "columns": "i32"}
    flags = {
        "SWIGLU": kind == "swiglu",
        "ALONG_COLUMNS": kind in ("swiglu", "both", "1x128"),
        "ALONG_ROWS": kind in ("both", "128x1"),
        "SQUARE": kind == "128x128",
    }
    constants = flags | {"E5M2": fp8_format == "e5m2", "POWER": False, "SOFT": False, "BLOCK": fp8_quantize.TILE}
    return Case(fp8_quantize._fp8_quantize, types, constants, fp8_quantize.WARPS)


def gemm_case(size: int, kind: str) -> Case:
    block_m, block_n, warps, stages = fp8_gemm.blocks(size, size)
    gradient = "*fp8e5" if kind == "wgrad hybrid" else "*fp8e4nv"
    types = {"a": gradient, "b": "*fp8e4nv", "c": "*fp32" if "wgrad" in kind else "*bf16"}
    types |= {"scale_a": "*fp32", "scale_b": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
    constants = {
        "TENSOR": kind == "tensor",
        "SQUARE_A": False,
        "SQUARE_B": kind == "fprop",
        "ADD": "wgrad" in kind,
        "GROUP": fp8_gemm.GROUP,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": fp8_gemm.TILE,
    }
    return Case(fp8_gemm._fp8_gemm, types, constants, warps, stages)


def adamw_case(moments: str) -> Case:
    types = {
        "main_param": "*fp32",
        "gradient": "*fp32",
        "exp_avg": moments,
        "exp_avg_sq": moments,
        "parameter": "*bf16",
    }
    types |= {"step": "*fp32", "clip": "*fp32", "skip": "*fp32", "count": "i32"}
    scalars = ("learning_rate", "decay", "beta1", "beta2", "log_beta1", "log_beta2", "eps")
    types |= dict.fromkeys(scalars, "fp32")
    return Case(adamw._adamw, types, {"COPY": True, "BLOCK": adamw.BLOCK}, adamw.WARPS)


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
CASES |= {f"_adamw-{moments}": adamw_case(moments) for moments in ("*fp32", "*bf16")}
# Tensor cores take FP8 from Hopper on.
FP8_CASES = {
    f"_fp8_quantize-{kind}-{fp8_format}": quantize_case(kind, fp8_format)
    for kind in ("1x128", "128x1", "128x128", "both", "swiglu")
    for fp8_format in ("e4m3", "e5m2")
} | {
    f"_fp8_gemm-{size}-{kind}": gemm_case(size, kind)
    for size in (64, 4096)
    for kind in ("fprop", "wgrad", "wgrad hybrid", "tensor")
}


def compile_for(case: Case, capability: int) -> Any:
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    # As a launch finds it: torch aligns its memory to more than 16 bytes, and common sizes divide by 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(case.kernel, signature, constants, aligned)
    options = {"num_warps": case.warps, "num_stages": case.stages, **OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class Usage(NamedTuple):
    """Of a thread: registers, and bytes of memory for what does not fit in them. Of a program: bytes of shared memory."""

    registers: int
    stack: int
    shared: int


def usage_of(compiled: Any, folder: Path) -> Usage:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    arguments = [program, "-res-usage", folder / "kernel.cubin"]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    registers, stack = (int(re.search(rf"{word}:(\d+)", run.stdout).group(1)) for word in ("REG", "STACK"))
    return Usage(registers, stack, compiled.metadata.shared)


TARGETS = [(name, capability) for name in CASES for capability in SHARED_BYTES]
TARGETS += [(name, capability) for name in FP8_CASES for capability in (90, 100)]


@pytest.mark.parametrize(("name", "capability"), TARGETS)
def test_the_kernel_compiles_without_spilling_registers(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    usage = usage_of(compile_for({**CASES, **FP8_CASES}[name], capability), tmp_path)
    print(
        f"{name:40} sm_{capability:<4} {usage.registers:4} registers {usage.stack:4} B spilled {usage.shared:7} B shared"
    )
    assert usage.shared <= SHARED_BYTES[capability]
    assert usage.stack == 0


INTENDED = {
    "_fp8_gemm-4096-fprop": {
        90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
        100: r"tcgen05\.mma\S*kind::f8f6f4",
    },
    "_fp8_gemm-4096-wgrad hybrid": {90: r"wgmma\.mma_async\S*\.e5m2\.e4m3", 100: r"tcgen05\.mma\S*kind::f8f6f4"},
    "_fp8_quantize-both-e4m3": {90: r"cvt\.rn\.satfinite\.e4m3x2\.f32", 100: r"cvt\.rn\.satfinite\.e4m3x2\.f32"},
    "_fp8_quantize-both-e5m2": {90: r"cvt\.rn\.satfinite\.e5m2x2\.f32", 100: r"cvt\.rn\.satfinite\.e5m2x2\.f32"},
}


@pytest.mark.parametrize(("name", "capability"), [(name, one) for name, ones in INTENDED.items() for one in ones])
def test_fp8_kernels_use_the_instructions_made_for_them(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    code = compile_for(FP8_CASES[name], capability).asm["ptx"]
    assert re.search(INTENDED[name][capability], code), f"no {INTENDED[name][capability]} in the PTX of {name}"
    assert "cp.async" in code or "gemm" not in name, "the operands are not fetched ahead"


@pytest.mark.parametrize("name", [name for name in [*CASES, *FP8_CASES] if "fp32" not in name])
def test_addresses_are_computed_in_64_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rows * columns of a long step is more than 2^31, so a program widens its number before it does anything with it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    code = compile_for({**CASES, **FP8_CASES}[name], 90).asm["ttir"]
    numbers = re.findall(r"(%\w+) = tt.get_program_id x", code)
    assert len(numbers) == 1
    uses = [line for line in code.splitlines() if re.search(rf"{numbers[0]}\b(?! =)", line)]
    assert uses and all("arith.extsi" in use and "to i64" in use for use in uses), uses

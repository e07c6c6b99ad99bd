"""FP8 on a GPU: time of the quantiser and of the three products of each backend beside bf16, and a 1B model's step.

    python -m benchmarks.gpu.fp8                 the products
    python -m benchmarks.gpu.fp8 --step          a step of llama-1b in bf16 and FP8: time, MFU and memory

Without a GPU it says so and measures nothing. Times are medians of 20 runs after 5 that warm up, read by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.machine import describe_machine
from benchmarks.options import run_or_exit
from parallax.precision.backends.choose import candidates
from parallax.precision.products import Products
from parallax.precision.recipe import Recipe

# Tokens, outputs and inputs of layers of Llama 3 8B and 70B at 8192 tokens.
SHAPES = [(8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 28672, 8192)]
ROOT = Path(__file__).parents[2]


def milliseconds(function: Callable[[], object]) -> float:
    times = []
    for run in range(25):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        if run >= 5:
            times.append(start.elapsed_time(stop))
    return median(times)


def products() -> None:
    recipe, device = Recipe(), torch.device("cuda")
    for candidate in candidates():
        if reason := candidate.why_not(recipe, device):
            print(f"{candidate.name}: not run: it {reason}")
    print(
        f"{'tokens':>7} {'out':>6} {'in':>6}  {'backend':<10} {'fprop':>8} {'dgrad':>8} {'wgrad':>8}  ms, quantising included"
    )
    for shape in SHAPES:
        _times_of_shape(recipe, *shape)


def _times_of_shape(recipe: Recipe, tokens: int, outputs: int, inputs: int) -> None:
    device = torch.device("cuda")
    x, weight, dy = (
        torch.randn(*shape, device=device).bfloat16()
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    total = torch.zeros(outputs, inputs, device=device)
    in_bf16 = (lambda: x @ weight.t(), lambda: dy @ weight, lambda: dy.t() @ x)
    _row(tokens, outputs, inputs, "bf16", [milliseconds(product) for product in in_bf16])
    for candidate in candidates():
        if candidate.name != "reference" and candidate.why_not(recipe, device) is None:
            layer = Products(recipe, candidate.make())
            _row(tokens, outputs, inputs, candidate.name, _times_of_layer(layer, x, weight, dy, total))


def _times_of_layer(
    layer: Products, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, total: torch.Tensor
) -> list[float]:
    layer.weights.open = True  # quantised once a step, and so not in the times
    tokens = x.shape[0]
    _, for_weight = layer.gradient(dy, tokens)
    return [
        milliseconds(lambda: layer.fprop(layer.input(x, False), weight, torch.bfloat16, False)),
        milliseconds(lambda: layer.dgrad(layer.gradient(dy, tokens)[0], weight, torch.bfloat16)),
        milliseconds(lambda: layer.wgrad(for_weight, layer.input_for_wgrad(x, tokens))(total)),
    ]


def _row(tokens: int, outputs: int, inputs: int, name: str, times: list[float]) -> None:
    print(f"{tokens:7} {outputs:6} {inputs:6}  {name:<10} " + " ".join(f"{time:8.3f}" for time in times))


def step() -> None:
    words = "--model llama-1b --seq-len 2048 --micro-batch 4 --global-batch 16 --steps 20 --eval-every 0".split()
    for precision in ("bf16", "fp8"):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, str(ROOT / "pretrain.py"), *words, "--precision", precision, "--out", out]
            run_or_exit(command, quiet=True)
            rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()][-10:]
        seconds = median(row["step_seconds"] for row in rows)
        shares = [row["mfu"] for row in rows if row["mfu"] is not None]
        mfu = f"{median(shares):.1%} of the bf16 peak" if shares else "unknown"
        memory = max(row["memory_bytes"] for row in rows) / 2**30
        print(f"{precision}: {1000 * seconds:.0f} ms a step, MFU {mfu}, {memory:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs a CUDA GPU, and torch sees none")
        return
    print(describe_machine(), torch.cuda.get_device_name())
    step() if options.step else products()


if __name__ == "__main__":
    main()

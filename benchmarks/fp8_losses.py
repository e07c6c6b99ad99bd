"""How the losses of FP8 training lie beside those of bf16: the default model on the embedded corpus, tile-wise and delayed.

    python -m benchmarks.fp8_losses                      three runs of 300 steps, one after another; about an hour on one core
    python -m benchmarks.fp8_losses --only tile          one of them; what was broken off goes on
    python -m benchmarks.fp8_losses --plot docs/fp8_losses.svg

The backend is the reference, so the losses are those of the arithmetic and of no GPU. Every run starts from the same weights
and sees the same data. Prints the held-out loss at each evaluation and how far it is from bf16's, which must be within 0.5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FP8 = ["--precision", "fp8", "--fp8-backend", "reference"]
RUNS = {
    "bf16": ["--precision", "bf16"],
    "tile": [*FP8, "--fp8-recipe", "tile"],
    "delayed": [*FP8, "--fp8-recipe", "delayed", "--fp8-format", "hybrid"],
}
TOLERANCE = (
    0.005  # of the loss; DeepSeek-AI 2024, arXiv:2412.19437, 3.3, found 0.25 % for models of 16B and 230B parameters
)


def train(name: str, steps: int, every: int, out: Path) -> None:
    words = ["--steps", str(steps), "--eval-every", str(every), "--save-every", str(every), "--out", str(out / name)]
    subprocess.run([sys.executable, str(ROOT / "pretrain.py"), *RUNS[name], *words], check=True)


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return {step: its metrics}; of a step that was done twice, after a break, the last."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def compare(runs: dict[str, dict[int, dict[str, float]]]) -> bool:
    """Print the held-out losses and their distance from bf16's; return whether all are within the tolerance."""
    within = True
    print(f"{'step':>6}  {'bf16':>8}" + "".join(f"  {name:>8}  {'':>8}" for name in runs if name != "bf16"))
    for step, row in runs["bf16"].items():
        if "eval_loss" not in row:
            continue
        line = f"{step:6}  {row['eval_loss']:8.4f}"
        for name, rows in runs.items():
            if name != "bf16":
                distance = rows[step]["eval_loss"] / row["eval_loss"] - 1
                within &= abs(distance) <= TOLERANCE
                line += f"  {rows[step]['eval_loss']:8.4f}  {distance:+8.3%}"
        print(line)
    return within


def plot(runs: dict[str, dict[int, dict[str, float]]], file: Path) -> None:
    """Draw the training losses, averaged over 10 steps, and the distances of the held-out ones."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "parallax"
    from matplotlib import pyplot

    colors = {"bf16": "#444444", "tile": "#1f77b4", "delayed": "#d95f02"}
    figure, (losses, distances) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for name, rows in runs.items():
        values = [rows[step]["loss"] for step in sorted(rows)]
        blocks = [values[i : i + 10] for i in range(0, len(values), 10)]
        steps = [10 * i + len(block) / 2 for i, block in enumerate(blocks)]
        means = [sum(block) / len(block) for block in blocks]
        losses.plot(steps, means, color=colors[name], label=name, lw=1.2)
        evaluated = [step for step in sorted(rows) if "eval_loss" in rows[step]]
        off = [100 * (rows[step]["eval_loss"] / runs["bf16"][step]["eval_loss"] - 1) for step in evaluated]
        distances.plot(evaluated, off, color=colors[name], marker="o", ms=3, lw=1.2, label=name)
    losses.set(xlabel="step", ylabel="training loss")
    losses.legend(frameon=False)
    distances.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="#eeeeee", zorder=0)
    distances.set(xlabel="step", ylabel="held-out loss from bf16's, %", ylim=(-0.8, 0.8))
    for axes in (losses, distances):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("runs/fp8_losses"))
    parser.add_argument("--only", choices=RUNS, help="train only this one, and compare nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as .svg or .png")
    options = parser.parse_args()
    for name in [options.only] if options.only else RUNS:
        train(name, options.steps, options.eval_every, options.out)
    if options.only:
        return
    runs = {name: rows_of(options.out / name) for name in RUNS}
    within = compare(runs)
    if options.plot is not None:
        plot(runs, options.plot)
    if not within:
        raise SystemExit(f"an FP8 loss is further than {TOLERANCE:.1%} from bf16's")


if __name__ == "__main__":
    main()

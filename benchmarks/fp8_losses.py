"""How the losses of FP8 training lie beside those of bf16: the default model on the embedded corpus, tile-wise and delayed.

    python -m benchmarks.fp8_losses                      four runs of 300 steps, one after another; 55 minutes on one core
    python -m benchmarks.fp8_losses --only tile          one of them; what was broken off goes on
    python -m benchmarks.fp8_losses --plot docs/fp8_losses.svg

The backend is the reference, so the losses are those of the arithmetic and of no GPU. Every run starts from the same weights
and sees the same data. Prints the held-out loss at each evaluation and how far it is from bf16's, which must be within 0.5 %.

The fourth run is a control, in fp32: how far it is from bf16 is what a difference in rounding alone does, however small, so
nothing nearer than that can be told apart. The higher the learning rate, the further that is: see docs/fp8.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from benchmarks.options import above_zero, at_least, run_or_exit

ROOT = Path(__file__).parents[1]
FP8 = ["--precision", "fp8", "--fp8-backend", "reference"]
RUNS = {
    "bf16": ["--precision", "bf16"],
    "fp32": ["--precision", "fp32"],
    "tile": [*FP8, "--fp8-recipe", "tile"],
    "delayed": [*FP8, "--fp8-recipe", "delayed", "--fp8-format", "hybrid"],
}
CONTROL = "fp32"
LEARNING_RATE = 0.0005
# Of the loss; DeepSeek-AI 2024, arXiv:2412.19437, 3.3, found 0.25 % for models of 16B and 230B parameters.
TOLERANCE = 0.005


def train(name: str, steps: int, every: int, learning_rate: float, out: Path) -> None:
    words = ["--steps", str(steps), "--eval-every", str(every), "--save-every", str(every)]
    words += ["--lr", str(learning_rate), "--out", str(out / name)]
    run_or_exit([sys.executable, str(ROOT / "pretrain.py"), *RUNS[name], *words])


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return {step: its metrics}; of a step that was done twice, after a break, the last."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def compare(runs: dict[str, dict[int, dict[str, float]]]) -> dict[str, float]:
    """Print the held-out losses and their distance from bf16's; return the greatest distance of each run."""
    others, most = [name for name in runs if name != "bf16"], dict.fromkeys(runs, 0.0)
    print(f"{'step':>6}  {'bf16':>8}" + "".join(f"  {name:>20}" for name in others))
    for step, row in runs["bf16"].items():
        if "eval_loss" not in row:
            continue
        line = f"{step:6}  {row['eval_loss']:8.4f}"
        for name in others:
            if step not in runs[name]:
                line += f"  {'-':>20}"
                continue
            loss = runs[name][step]["eval_loss"]
            distance = loss / row["eval_loss"] - 1
            most[name] = max(most[name], abs(distance))
            line += f"  {loss:11.4f} {distance:+8.2%}"
        print(line)
    return most


def plot(runs: dict[str, dict[int, dict[str, float]]], file: Path) -> None:
    """Draw the training losses, averaged over 10 steps, and the distances of the held-out ones."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "parallax"
    from matplotlib import pyplot

    colors = {"bf16": "#444444", "tile": "#1f77b4", "delayed": "#d95f02", "fp32": "#999999"}
    figure, (losses, distances) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for name, rows in runs.items():
        values = [rows[step]["loss"] for step in sorted(rows)]
        blocks = [values[i : i + 10] for i in range(0, len(values), 10)]
        steps = [10 * i + len(block) / 2 for i, block in enumerate(blocks)]
        means = [sum(block) / len(block) for block in blocks]
        look = {"color": colors[name], "label": name, "lw": 1.2, "ls": "--" if name == CONTROL else "-"}
        losses.plot(steps, means, **look)
        evaluated = [step for step in sorted(rows) if "eval_loss" in rows[step]]
        off = [100 * (rows[step]["eval_loss"] / runs["bf16"][step]["eval_loss"] - 1) for step in evaluated]
        distances.plot(evaluated, off, marker="o", ms=3, **look)
    losses.set(xlabel="step", ylabel="training loss")
    losses.legend(frameon=False)
    distances.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="#eeeeee", zorder=0)
    distances.set(xlabel="step", ylabel="held-out loss from bf16's, %")
    for axes in (losses, distances):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(1), default=300)
    parser.add_argument("--eval-every", type=at_least(1), default=50)
    parser.add_argument("--lr", type=above_zero, default=LEARNING_RATE)
    parser.add_argument("--out", type=Path, default=Path("runs/fp8_losses"))
    parser.add_argument("--only", choices=RUNS, help="train only this one, and compare nothing")
    parser.add_argument("--no-train", action="store_true", help="compare what is there, of unfinished runs too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as .svg or .png")
    options = parser.parse_args()
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib")
    missing = [name for name in RUNS if not (options.out / name / "metrics.jsonl").is_file()]
    if options.no_train and missing:
        parser.error(
            f"--no-train: there is no run {', '.join(missing)} in {options.out}; leave it out, or give the runs' --out"
        )
    for name in [] if options.no_train else [options.only] if options.only else RUNS:
        train(name, options.steps, options.eval_every, options.lr, options.out)
    if options.only:
        return
    runs = {name: rows_of(options.out / name) for name in RUNS}
    most = compare(runs)
    if options.plot is not None:
        plot(runs, options.plot)
    beyond = [f"{name} {most[name]:.2%}" for name in runs if name != CONTROL and most[name] > TOLERANCE]
    unfinished = [f"{name} is at step {max(rows)}" for name, rows in runs.items() if max(rows) < options.steps]
    if unfinished:
        print("unfinished:", ", ".join(unfinished))
    if beyond:
        raise SystemExit(f"further than {TOLERANCE:.1%} from bf16: {', '.join(beyond)}; {CONTROL} {most[CONTROL]:.2%}")


if __name__ == "__main__":
    main()

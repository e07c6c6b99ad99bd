"""The chart as PNG or SVG, drawn by matplotlib, which is imported only here and only when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallax.errors import ConfigError
from parallax.pipeline.draw import NAMES, Block, Chart, color_of, is_dark

_POINTS = 72  # in an inch
_LEAST_LABEL = 9.0  # points that a box must be wide to be numbered


def save_figure(chart: Chart, path: str | Path, kind: str) -> None:
    """Write the chart to `path` as `kind`, png or svg; raises ConfigError if matplotlib is missing or the path is no good."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{path} cannot be drawn: matplotlib is not installed; pip install 'parallax-lm[plot]', or use --html"
        ) from error
    width = min(40.0, max(10.0, 0.16 * chart.end / chart.shortest))
    height = 0.36 * len(chart.rows) + 2.6
    figure = Figure(figsize=(width, height), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[0.36 * len(chart.rows), 1.4])
    label_from = _LEAST_LABEL * chart.end / ((width - 1) * _POINTS)
    for rank, row in enumerate(chart.rows):
        for block in row:
            _draw_block(above, chart, rank, block, block.end - block.start >= label_from)
    above.set(yticks=range(len(chart.rows)), ylim=(len(chart.rows) - 0.45, -0.55), facecolor="#eeeeee")
    above.set_yticklabels([f"rank {rank}  {chart.idle(rank):.0%} idle" for rank in range(len(chart.rows))])
    above.set_title(chart.title, fontsize=10, loc="left")
    _draw_curves(below, chart)
    _draw_legend(figure, chart)
    try:
        figure.savefig(path, dpi=150, format=kind)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _draw_block(axes: Any, chart: Chart, rank: int, block: Block, labelled: bool) -> None:
    height = 0.86 / len(block.parts)
    for place, (action, tone) in enumerate(zip(block.parts, block.tones, strict=True)):
        color = color_of(action.kind, tone, chart.num_tones)
        middle = rank - 0.43 + (place + 0.5) * height
        box = {"left": block.start, "height": height, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(middle, block.end - block.start, color=[part / 255 for part in color], **box)
        if labelled:
            ink = {"ha": "center", "va": "center", "fontsize": 6, "color": "white" if is_dark(color) else "black"}
            axes.text((block.start + block.end) / 2, middle, str(action.micro_batch), clip_on=True, **ink)


def _draw_curves(axes: Any, chart: Chart) -> None:
    for rank, curve in enumerate(chart.in_flight):
        shade = rank / max(1, len(chart.in_flight) - 1)
        times, held = zip(*curve, (chart.end, curve[-1][1]), strict=True)
        axes.step(times, held, where="post", color=(0.15 + 0.7 * shade, 0.3, 0.85 - 0.7 * shade), linewidth=1)
    axes.set(xlim=(0, chart.end), ylim=(0, None), xlabel="time", ylabel="in flight")


def _draw_legend(figure: Any, chart: Chart) -> None:
    from matplotlib.patches import Patch

    used = {action.kind for row in chart.rows for block in row for action in block.parts}
    patches = []
    for kind, name in NAMES.items():
        if kind in used:
            red, green, blue = (part / 255 for part in color_of(kind, 0, 1))
            patches.append(Patch(color=(red, green, blue), label=f"{kind} {name}"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)

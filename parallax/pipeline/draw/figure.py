"""Charts as PNG or SVG, drawn by matplotlib, which is imported only here and only when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallax.errors import ConfigError
from parallax.pipeline.draw import NAMES, Block, Chart, color_of, is_dark

_POINTS = 72  # in an inch
_ROW, _CURVES, _AROUND = 0.36, 1.5, 0.75  # inches: of a rank, of the curves, of title and axis of a chart
_NARROWEST, _MOST_WIDTH = 10.0, 22.0  # inches
_DIGIT = 4.2  # points that a digit of a number in a box needs
_OUTLINE = "#222222"  # of a pair


def save_figure(charts: Sequence[Chart], path: str | Path, kind: str) -> None:
    """Write the charts, one below the other on one scale of time, to `path` as `kind`, png or svg.

    Raises ConfigError if matplotlib is missing or the path is no good.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{path} cannot be drawn: matplotlib is not installed; pip install matplotlib, or use --html"
        ) from error
    end = max(chart.end for chart in charts)
    width = min(_MOST_WIDTH, max(_NARROWEST, 0.16 * end / min(chart.shortest for chart in charts)))
    rows = [_ROW * len(chart.rows) for chart in charts]
    height = sum(row + _CURVES + _AROUND for row in rows) + 0.5
    figure = Figure(figsize=(width, height), layout="constrained")
    ratios = [ratio for row in rows for ratio in (row + 0.3, _CURVES)]
    axes = figure.subplots(2 * len(charts), 1, sharex=True, height_ratios=ratios)
    points = (width - 1.2) * _POINTS / end  # of a unit of time
    for index, chart in enumerate(charts):
        _draw_rows(axes[2 * index], chart, points)
        _draw_curves(axes[2 * index + 1], chart)
    axes[-1].set(xlabel="time", xlim=(0, end))
    _draw_legend(figure, charts)
    try:
        figure.savefig(path, dpi=150, format=kind)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _draw_rows(axes: Any, chart: Chart, points: float) -> None:
    for rank, row in enumerate(chart.rows):
        axes.barh(rank, chart.end, height=0.86, left=0, color="#e9e9e9", linewidth=0)  # what is not covered is idle
        for block in row:
            _draw_block(axes, chart, rank, block, (block.end - block.start) * points)
    axes.set(yticks=range(len(chart.rows)), ylim=(len(chart.rows) - 0.45, -0.55))
    axes.set_yticklabels([f"rank {rank}  {chart.idle(rank):.0%} idle" for rank in range(len(chart.rows))])
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)
    axes.set_title(chart.title.replace("$", r"\$"), fontsize=10, loc="left")  # a file's name is no formula


def _draw_block(axes: Any, chart: Chart, rank: int, block: Block, points: float) -> None:
    height = 0.86 / len(block.parts)
    length = block.end - block.start
    for place, (action, tone) in enumerate(zip(block.parts, block.tones, strict=True)):
        color = color_of(action.kind, tone, chart.num_tones)
        middle = rank - 0.43 + (place + 0.5) * height
        box = {"left": block.start, "height": height, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(middle, length, color=_rgb(color), **box)
        label = str(action.micro_batch)
        if points >= _DIGIT * len(label) + 1:
            ink = {
                "ha": "center",
                "va": "center_baseline",
                "fontsize": 6,
                "color": "white" if is_dark(color) else "black",
            }
            axes.text((block.start + block.end) / 2, middle, label, clip_on=True, **ink)
    if len(block.parts) > 1:
        axes.barh(rank, length, left=block.start, height=0.86, fill=False, edgecolor=_OUTLINE, linewidth=0.9, zorder=3)


def _draw_curves(axes: Any, chart: Chart) -> None:
    """Draw what each rank holds; ranks with equal curves lie on each other, so each is a little thinner than the one before."""
    from matplotlib import colormaps

    last = max(1, len(chart.in_flight) - 1)
    for rank, curve in enumerate(chart.in_flight):
        times, held = zip(*curve, (chart.end, curve[-1][1]), strict=True)
        width = 2.6 - 1.8 * rank / last
        label = f"rank {rank}: {chart.most_in_flight[rank]}"
        axes.step(
            times, held, where="post", color=colormaps["viridis"](0.9 * rank / last), linewidth=width, label=label
        )
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(ylim=(0, 1.08 * max(chart.most_in_flight)), ylabel="in flight")
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.in_flight) <= 16:
        axes.legend(
            title="most",
            title_fontsize=7,
            fontsize=7,
            ncols=1 + (last >= 8),
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )


def _draw_legend(figure: Any, charts: Sequence[Chart]) -> None:
    from matplotlib.patches import Patch

    chart = max(charts, key=lambda each: each.num_tones)
    patches = []
    for kind in chart.kinds:
        patches.append(Patch(color=_rgb(color_of(kind, 0, 1)), label=f"{kind} {NAMES[kind]}"))
    if chart.lighter:
        patches.append(Patch(color=_rgb(color_of("F", 1, 2)), label=f"lighter: {chart.lighter}"))
    if chart.has_pairs:
        patches.append(Patch(facecolor="white", edgecolor=_OUTLINE, label="two at once"))
    patches.append(Patch(color="#e9e9e9", label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=7.5, frameon=False)


def _rgb(color: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = (part / 255 for part in color)
    return red, green, blue

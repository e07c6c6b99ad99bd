"""The chart as one HTML file: boxes say what they are under the pointer, and the same micro-batch lights up on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from parallax.pipeline.draw import NAMES, Block, Chart, color_of, describe, is_dark

_ROW, _GAP, _LEFT, _CURVES = 32, 6, 70, 130  # pixels
_TOP = 2  # so that no outline is cut
_NARROWEST, _LEAST_WIDTH, _MOST_WIDTH = 22, 900, 12000  # of the shortest box; of the whole

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff }
div.scroll { overflow-x: auto }
text { font: 11px system-ui, sans-serif; text-anchor: middle; dominant-baseline: central; pointer-events: none }
text.name { text-anchor: end; font-size: 12px }
g.block rect { stroke: #fff; stroke-width: 1 }
g.block rect.pair { fill: none; stroke: #222; stroke-width: 1.5 }
svg.picked g.block { opacity: 0.2 }
svg.picked g.block.same { opacity: 1 }
polyline { fill: none; stroke-width: 1.5; stroke-opacity: 0.8 }
span.key { display: inline-block; width: 14px; height: 14px; margin: 0 6px 0 18px; vertical-align: -2px }
"""
_SCRIPT = """
for (const chart of document.querySelectorAll("svg"))
for (const block of chart.querySelectorAll("g.block")) {
  block.addEventListener("mouseenter", () => {
    chart.classList.add("picked");
    for (const number of block.dataset.batches.split(" "))
      for (const other of chart.querySelectorAll(`g.block[data-batches~="${number}"]`)) other.classList.add("same");
  });
  block.addEventListener("mouseleave", () => {
    chart.classList.remove("picked");
    for (const other of chart.querySelectorAll("g.same")) other.classList.remove("same");
  });
}
"""


def to_html(charts: Sequence[Chart]) -> str:
    """Return the page with the charts one below the other; it needs nothing else, not even a network."""
    shortest, end = min(chart.shortest for chart in charts), max(chart.end for chart in charts)
    unit = min(max(_NARROWEST / shortest, _LEAST_WIDTH / end), _MOST_WIDTH / end)
    pictures = "\n".join(f"<h3>{escape(chart.title)}</h3>\n{_picture(chart, unit, end)}" for chart in charts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(charts[0].title)}</title>'
        f'<style>{_STYLE}</style></head>\n<body><div class="scroll">\n{pictures}\n</div>\n'
        f"<p>{_legend(charts[0])}</p>\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _legend(chart: Chart) -> str:
    keys = [(_css(color_of(kind, 0, 1)), f"{kind} {NAMES[kind]}") for kind in chart.kinds]
    if chart.lighter:
        keys.append((_css(color_of("F", 1, 2)), f"lighter: {chart.lighter}"))
    spans = [f'<span class="key" style="background: {color}"></span>{escape(words)}' for color, words in keys]
    if chart.has_pairs:
        spans.append('<span class="key" style="border: 1.5px solid #222"></span>two at once')
    return "".join(spans)


def _picture(chart: Chart, unit: float, end: float) -> str:
    rows = len(chart.rows) * (_ROW + _GAP)
    width, height = round(_LEFT + end * unit + 20), rows + _CURVES + 40 + _TOP
    parts = [f'<svg width="{width}" height="{height}" xmlns="http://www.w3.org/2000/svg">']
    for rank, row in enumerate(chart.rows):
        top = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text class="name" x="{_LEFT - 8}" y="{top + _ROW / 2}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{chart.end * unit:.1f}" height="{_ROW}" fill="#eee">'
            f"<title>rank {rank} is idle {chart.idle(rank):.1%} of the time</title></rect>"
        )
        parts += [_block(chart, rank, block, top, unit) for block in row]
    parts += _curves(chart, _TOP + rows + 10, unit)
    return "\n".join([*parts, "</svg>"])


def _block(chart: Chart, rank: int, block: Block, top: float, unit: float) -> str:
    left, width = _LEFT + block.start * unit, (block.end - block.start) * unit
    height = _ROW / len(block.parts)
    batches = " ".join(str(action.micro_batch) for action in block.parts)
    inner = [f"<title>{escape(describe(rank, block))}</title>"]
    for place, (action, tone) in enumerate(zip(block.parts, block.tones, strict=True)):
        color = color_of(action.kind, tone, chart.num_tones)
        y = top + place * height
        inner.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_css(color)}"/>'
        )
        if width >= 14:
            ink = "#fff" if is_dark(color) else "#222"
            x, middle = left + width / 2, y + height / 2
            inner.append(f'<text x="{x:.1f}" y="{middle:.1f}" fill="{ink}">{action.micro_batch}</text>')
    if len(block.parts) > 1:
        inner.append(f'<rect class="pair" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW}"/>')
    return f'<g class="block" data-batches="{batches}">{"".join(inner)}</g>'


def _curves(chart: Chart, top: float, unit: float) -> Iterator[str]:
    """Yield a line for each rank: the micro-batches that it holds over time."""
    most = max(1, *chart.most_in_flight)
    bottom = top + _CURVES
    yield f'<text class="name" x="{_LEFT - 8}" y="{bottom}">0</text>'
    yield f'<text class="name" x="{_LEFT - 8}" y="{top + 6}">{most}</text>'
    yield f'<text class="name" x="{_LEFT - 8}" y="{top + _CURVES / 2}">in flight</text>'
    for rank, curve in enumerate(chart.in_flight):
        points, before = [], 0
        for time, held in (*curve, (chart.end, curve[-1][1])):
            x = _LEFT + time * unit
            points += [
                f"{x:.1f},{bottom - before / most * _CURVES:.1f}",
                f"{x:.1f},{bottom - held / most * _CURVES:.1f}",
            ]
            before = held
        hue = 240 - 240 * rank / max(1, len(chart.in_flight) - 1)
        yield (
            f'<polyline points="{" ".join(points)}" stroke="hsl({hue:.0f} 70% 45%)">'
            f"<title>rank {rank} holds at most {chart.most_in_flight[rank]}</title></polyline>"
        )


def _css(color: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)

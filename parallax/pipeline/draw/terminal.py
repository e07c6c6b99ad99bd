"""The chart as text: columns of a terminal are time, and a box is filled with the background colour of its kind."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from parallax.pipeline.draw import NAMES, Block, Chart, color_of, is_dark

_BARS = " ▁▂▃▄▅▆▇█"
_MOST_COLUMNS = 4  # for the shortest box; wider ones show no more
_IDLE = "·"


def to_text(chart: Chart, width: int = 100, colored: bool = True) -> Text:
    """Return the chart in at most about `width` columns; without colours the letters of the kinds stand in the boxes."""
    name = len(f"rank {len(chart.rows) - 1} ")
    room = max(20, width - name - len(" 100.0% in flight"))
    scale = min(room / chart.end, _MOST_COLUMNS / chart.shortest)
    if scale > 1:
        scale = float(int(scale))  # whole columns, so that equal times look equal
    columns = max(1, round(chart.end * scale))
    text = Text(chart.title + "\n\n", no_wrap=True)
    text.append(" " * (name + columns) + "   idle in flight\n", Style(dim=True))
    for rank, row in enumerate(chart.rows):
        text.append(f"rank {rank} ".rjust(name))
        _append_row(text, chart, row, scale, columns, colored)
        text.append(f" {chart.idle(rank):6.1%} {chart.most_in_flight[rank]:>9}\n")
    text.append("held ".rjust(name) + _curve(chart, scale, columns), Style(dim=True))
    text.append(f"        {max(chart.most_in_flight):>9}\n\n", Style(dim=True))
    for kind in chart.kinds:
        text.append(f" {kind} ", _style(kind, 0, 1) if colored else Style())
        text.append(f" {NAMES[kind]}   ")
    if colored and chart.lighter:
        text.append(f" lighter: {chart.lighter}")
    return text


def _append_row(text: Text, chart: Chart, row: tuple[Block, ...], scale: float, columns: int, colored: bool) -> None:
    at = 0
    for block in row:
        start, end = round(block.start * scale), min(columns, round(block.end * scale))
        text.append(_IDLE * (start - at), Style(dim=True))
        at = max(at, start)
        if end > at:
            label = _label(block, end - at, colored).ljust(end - at)
            if not colored:
                text.append(label)
            elif len(block.parts) == 1:
                text.append(label, _style(block.parts[0].kind, block.tones[0], chart.num_tones))
            else:
                half = label.index("|") if "|" in label else (len(label) + 1) // 2
                for piece, part, tone in zip((label[:half], label[half:]), block.parts, block.tones, strict=True):
                    text.append(piece, _style(part.kind, tone, chart.num_tones))
            at = end
    text.append(_IDLE * (columns - at), Style(dim=True))


def _label(block: Block, width: int, colored: bool) -> str:
    """Return the fullest label that fits."""
    numbers = [str(part.micro_batch) for part in block.parts]
    kinds = [part.kind for part in block.parts]
    full = [kind + number for kind, number in zip(kinds, numbers, strict=True)]
    labels = ["|".join(full), *(["|".join(numbers)] if colored else []), "|".join(kinds), "".join(kinds), "X"]
    if colored and len(kinds) == 1:
        labels = [*labels[:2], " "]  # the colour says the kind
    return next((label for label in labels if len(label) <= width), "")


def _curve(chart: Chart, scale: float, columns: int) -> str:
    """Return a bar for each column: the most micro-batches that any rank holds then."""
    most = max(1, *chart.most_in_flight)
    heights = [0] * columns
    for curve in chart.in_flight:
        for (time, held), following in zip(curve, [*curve[1:], (chart.end, 0)], strict=True):
            for column in range(round(time * scale), min(columns, round(following[0] * scale))):
                heights[column] = max(heights[column], held)
    return "".join(_BARS[-(-height * (len(_BARS) - 1) // most)] for height in heights)


def _style(kind: str, tone: int, num_tones: int) -> Style:
    color = color_of(kind, tone, num_tones)
    red, green, blue = color
    return Style(color="white" if is_dark(color) else "black", bgcolor=f"rgb({red},{green},{blue})")

"""What --trace-pipeline leaves behind: the step as it was, beside its simulation with the times that were measured."""

from __future__ import annotations

from pathlib import Path

from parallax.pipeline.draw import chart_of, chart_of_trace
from parallax.pipeline.draw.page import to_html
from parallax.pipeline.draw.perfetto import to_perfetto
from parallax.pipeline.simulator import simulate
from parallax.pipeline.trace import Trace, write_trace
from parallax.storage import write_whole


def write_pipeline_trace(trace: Trace, folder: Path) -> list[Path]:
    """Write the trace into `folder` for `parallax schedule show`, for a browser, and for ui.perfetto.dev; return the files."""
    stem = folder / trace.name.replace(" ", "-")
    data, page, perfetto = (stem.with_suffix(suffix) for suffix in (".json", ".html", ".perfetto.json"))
    simulated = simulate(trace.schedule(), trace.costs())
    title = f"{trace.name}, simulated with the times measured, messages taking none"
    write_trace(trace, data)
    write_whole(page, to_html([chart_of_trace(trace), chart_of(trace.schedule(), simulated, title)]))
    write_whole(perfetto, to_perfetto(trace))
    return [data, page, perfetto]

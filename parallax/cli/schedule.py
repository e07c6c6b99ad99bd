"""`parallax schedule`: draw a pipeline schedule, simulate one, compare all, under given costs.

A schedule is a name, a file `my.csv` with a table as `parallax.pipeline.tables` describes it, or `auto`, the one that the
simulator finds best; each is checked first. `show step.json` draws a recorded step beside its simulation.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallax.cli.schedule_costs import COST_HELP, MEMORY_HELP, RecordedCosts, costs, memory
from parallax.errors import ConfigError
from parallax.pipeline.actions import Schedule
from parallax.pipeline.check import check_schedule
from parallax.pipeline.costs import Costs
from parallax.pipeline.schedules import ALL_SCHEDULES, make_schedule
from parallax.pipeline.schedules.automatic import Candidate, Choice, choose_schedule, compare_schedules
from parallax.pipeline.simulator import Simulation, simulate
from parallax.pipeline.tables import read_csv, to_csv

if TYPE_CHECKING:
    from parallax.pipeline.draw import Chart

_AUTO = "auto"
_FILES = ("png", "svg", "html", "csv", "perfetto")


def add_commands(groups: argparse._SubParsersAction) -> None:
    """Add the parsers of this group."""
    group = groups.add_parser("schedule", help="draw, simulate and compare pipeline schedules", allow_abbrev=False)
    commands = group.add_subparsers(metavar="COMMAND", required=True, dest="schedule_command")
    names = "\n".join(f"  {name:<19} {record.about}" for name, record in ALL_SCHEDULES.items())
    layout: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    epilog = (
        f"schedules:\n{names}\n  auto                the one that compare finds best, costs being of a rank's share of the model\n"
        "  FILE.csv            a table of your own, or of torch.distributed.pipelining"
    )

    show = commands.add_parser(
        "show",
        help="draw a schedule in the terminal or into files",
        epilog=f"{epilog}\n  FILE.json           a recorded step (--trace-pipeline of a run), drawn above its simulation",
        **layout,
    )
    _add_schedule(show)
    show.add_argument("--png", metavar="FILE", type=Path, help="draw into a PNG file, with matplotlib")
    show.add_argument("--svg", metavar="FILE", type=Path, help="draw into an SVG file, with matplotlib")
    show.add_argument(
        "--html", metavar="FILE", type=Path, help="draw into an HTML file, with details under the pointer"
    )
    show.add_argument(
        "--csv", metavar="FILE", type=Path, help="write the table, which can be edited and given in place of a name"
    )
    show.add_argument(
        "--perfetto", metavar="FILE", type=Path, help="write a recorded step for ui.perfetto.dev or chrome://tracing"
    )
    show.set_defaults(run=_show)

    play = commands.add_parser("simulate", help="say how long a step takes and what it holds", epilog=epilog, **layout)
    _add_schedule(play)
    play.add_argument(
        "--json", action="store_true", help="print makespan, bubble of the worst rank and of each, peak in flight"
    )
    play.set_defaults(run=_simulate)

    compare = commands.add_parser(
        "compare",
        help="simulate all schedules for the same model on the same ranks",
        description="Simulate all schedules for the same model on the same ranks. Durations are of a rank's share of the model:\n"
        "where a rank holds 2 stages, an action takes half of it; a message takes the same everywhere.",
        **layout,
    )
    _add_sizes(compare, required=True)
    compare.add_argument("--json", action="store_true", help="print a list of objects")
    compare.set_defaults(run=_compare)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a schedule, see below")
    _add_sizes(parser, required=False)
    parser.add_argument(
        "--chunks",
        metavar="INT",
        type=_whole,
        help="stages on each rank, for interleaved and interleaved-paired (default: 2)",
    )
    parser.add_argument("--limit", metavar="BYTES", type=_bytes, help="for auto: what a rank may hold, of --memory")


def _add_sizes(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--stages", metavar="INT", type=_whole, required=required, help="ranks in the pipeline, --pp of a run"
    )
    parser.add_argument("--micro-batches", metavar="INT", type=_whole, required=required, help="of a step, in total")
    parser.add_argument("--cost", metavar="F=1,...", type=costs, default=Costs(), help=COST_HELP)
    parser.add_argument("--memory", metavar="activations=1e9,...", type=memory, help=MEMORY_HELP)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from 1")
    return int(text)


def _bytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number of bytes, as in 80e9")
    return number


def _played(options: argparse.Namespace) -> tuple[Schedule, Simulation, Choice | None]:
    """Return the schedule that was asked for, checked, its simulation, and how it was chosen if that was left to us."""
    if options.limit is not None and (options.name != _AUTO or options.memory is None):
        raise ConfigError("--limit is for auto, and needs --memory to know what is held")
    choice = None
    if options.name.endswith(".csv"):
        schedule = read_csv(options.name)
        asked = {"--stages": (options.stages, schedule.num_ranks), "--chunks": (options.chunks, None)}
        asked["--micro-batches"] = (options.micro_batches, schedule.num_micro_batches)
        _refuse_contradictions(options.name, asked)
    elif options.name not in (*ALL_SCHEDULES, _AUTO):
        raise ConfigError(
            f"schedule {options.name} is unknown; use {', '.join(ALL_SCHEDULES)}, {_AUTO} or a file with a table, FILE.csv"
        )
    elif options.stages is None or options.micro_batches is None:
        raise ConfigError(f"schedule {options.name} needs its sizes; give --stages and --micro-batches")
    elif options.name == _AUTO:
        if options.chunks is not None:
            raise ConfigError("--chunks is chosen by auto too; leave it out, or name a schedule")
        sizes = (options.stages, options.micro_batches)
        choice = choose_schedule(*sizes, options.cost, options.memory, memory_limit=options.limit)
        schedule = choice.schedule
    else:
        schedule = make_schedule(options.name, options.stages, options.micro_batches, options.chunks)
    check_schedule(schedule)
    if choice is not None:
        return schedule, choice.chosen.played, choice
    given = options.cost
    if isinstance(given, RecordedCosts):
        given = given.split(schedule.num_stages / schedule.num_ranks)
    return schedule, simulate(schedule, given, options.memory), None


def _refuse_contradictions(name: str, asked: dict[str, tuple[Any, Any]]) -> None:
    for flag, (value, actual) in asked.items():
        if value not in (None, actual):
            raise ConfigError(f"{flag} {value} contradicts {name}, which says itself what it is; leave it out")


def _show(options: argparse.Namespace) -> int:
    from parallax.pipeline.draw import chart_of

    files = {kind: path for kind in _FILES if (path := getattr(options, kind)) is not None}
    for path in files.values():
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if options.name.endswith(".json"):
        schedule, charts = _recorded(options, files)
    elif "perfetto" in files:
        raise ConfigError("--perfetto is for a recorded step, FILE.json in place of a name")
    else:
        schedule, played, choice = _played(options)
        charts = [chart_of(schedule, played)]
        if choice is not None:
            print(f"auto chose {choice.why}", file=sys.stderr if files else sys.stdout)
    if "csv" in files:
        _write(files["csv"], to_csv(schedule))
    _draw(charts, files)
    for path in files.values():
        print(path)
    return 0


def _recorded(options: argparse.Namespace, files: dict[str, Path]) -> tuple[Schedule, list[Chart]]:
    """Return what a recorded step did, and its chart with that of the simulation under its measured times."""
    from dataclasses import replace

    from parallax.pipeline.draw import chart_of, chart_of_trace
    from parallax.pipeline.draw.perfetto import to_perfetto
    from parallax.pipeline.trace import read_trace

    asked = {
        f"--{name.replace('_', '-')}": (getattr(options, name), None) for name in ("stages", "micro_batches", "chunks")
    }
    _refuse_contradictions(options.name, asked)
    given: Costs = options.cost
    of_messages = {"latency": given.latency, "message_bytes": given.message_bytes, "bandwidth": given.bandwidth}
    if given != Costs(**of_messages) or options.memory is not None or options.limit is not None:
        raise ConfigError(
            f"{options.name} brings its own times; of --cost only comm, bytes and bandwidth go with it, and neither --memory "
            "nor --limit"
        )
    trace = read_trace(options.name)
    schedule = trace.schedule()
    measured = replace(trace.costs(), **of_messages)
    if "perfetto" in files:
        _write(files["perfetto"], to_perfetto(trace))
    simulated = chart_of(schedule, simulate(schedule, measured), f"{trace.name}, simulated with the times measured")
    return schedule, [chart_of_trace(trace), simulated]


def _draw(charts: list[Chart], files: dict[str, Path]) -> None:
    if "html" in files:
        from parallax.pipeline.draw.page import to_html

        _write(files["html"], to_html(charts))
    if "png" in files or "svg" in files:  # last, since they need matplotlib
        from parallax.pipeline.draw.figure import save_figure

        for kind in ("png", "svg"):
            if kind in files:
                save_figure(charts, files[kind], kind)
    if not files:
        from rich.console import Console

        from parallax.pipeline.draw.terminal import to_text

        console = Console(width=shutil.get_terminal_size((120, 24)).columns, highlight=False)
        # With 16 colours kinds and tones would fall together; letters tell them apart.
        colored = console.color_system in ("256", "truecolor")
        for chart in charts:
            console.print(to_text(chart, console.width, colored), soft_wrap=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _simulate(options: argparse.Namespace) -> int:
    schedule, played, choice = _played(options)
    if options.json:
        numbers: dict[str, Any] = {"makespan": played.makespan, "bubble": max(played.bubble)}
        numbers |= {"bubble_per_rank": played.bubble, "peak_in_flight": played.peak_in_flight}
        if options.memory is not None:
            numbers["peak_bytes"] = played.peak_bytes
        if choice is not None:
            numbers |= {"schedule": choice.name, "chunks": choice.num_chunks, "why": choice.why}
        json.dump(numbers, sys.stdout)
        print()
        return 0
    if choice is not None:
        print(f"auto chose {choice.why}\n")
    worst = max(played.bubble)
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
    print(f"{schedule.name}: {sizes}")
    print(f"makespan {played.makespan:g}, bubble {worst:g} ({worst / played.makespan:.1%}) on the worst rank\n")
    print(f"rank    busy  bubble       in flight{'       bytes' if played.peak_bytes else ''}")
    for rank, (busy, bubble, held) in enumerate(zip(played.busy, played.bubble, played.peak_in_flight, strict=True)):
        held_bytes = f" {played.peak_bytes[rank]:>11.5g}" if played.peak_bytes else ""
        print(f"{rank:>4} {busy:>7g} {bubble:>7g} {bubble / played.makespan:>6.1%} {held:>8}{held_bytes}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    found, refused = compare_schedules(options.stages, options.micro_batches, options.cost, options.memory)
    if options.json:
        json.dump([_result(candidate) for candidate in found], sys.stdout)
        print()
        return 0
    held = f" {'bytes':>10}" if options.memory is not None else ""
    print(f"schedule            stages   makespan  bubble  in flight  weights  messages{held}")
    for candidate in found:
        result = _result(candidate)
        held = f" {result['bytes']:>10.4g}" if options.memory is not None else ""
        print(
            f"{result['schedule']:<18} {result['stages']:>7} {result['makespan']:>10.6g} "
            f"{result['bubble'] / result['makespan']:>7.1%} {result['activations']:>10.4g} {result['weights']:>8.3g} "
            f"{result['messages']:>9}{held}"
        )
    print(
        "\nbubble: of the worst rank. in flight: most activations on a rank, in micro-batches of a rank's share of the model.\n"
        "weights: on a rank, in such shares. messages: on all links together."
    )
    for reason in refused:
        print(f"left out: {reason}")
    return 0


def _result(candidate: Candidate) -> dict[str, Any]:
    played = candidate.played
    result = {
        "schedule": candidate.name,
        "stages": candidate.schedule.num_stages,
        "makespan": played.makespan,
        "bubble": max(played.bubble),
        "activations": candidate.activations,
        "weights": candidate.weights,
        "messages": len(played.arrivals),
    }
    return result | ({"bytes": max(played.peak_bytes)} if played.peak_bytes else {})

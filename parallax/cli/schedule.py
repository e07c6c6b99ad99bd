"""`parallax schedule`: draw a pipeline schedule, simulate one, compare all, under given costs.

A schedule is a name or a file, `my.csv`, with a table as `parallax.pipeline.tables` describes it; each is checked first.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

from parallax.errors import ConfigError
from parallax.pipeline.actions import Schedule
from parallax.pipeline.check import check_schedule
from parallax.pipeline.costs import Costs
from parallax.pipeline.schedules import ALL_SCHEDULES, make_schedule
from parallax.pipeline.simulator import Simulation, simulate
from parallax.pipeline.tables import read_csv, to_csv

_COST_FIELDS = {"F": "forward", "I": "input_gradient", "W": "weight_gradient", "FB": "pair", "comm": "latency"}
_COST_HELP = (
    "durations, all in one unit: F forward, I backward of the input, W backward of the weights (a whole backward is I + W), FB "
    "a forward and a backward together (F + I + W unless given), comm a message; 1,1,1 and comm=0 if not given"
)
_COMPARED_CHUNKS = (2, 4)  # of schedules with any number of stages on a rank


def add_commands(groups: argparse._SubParsersAction) -> None:
    """Add the parsers of this group."""
    group = groups.add_parser("schedule", help="draw, simulate and compare pipeline schedules", allow_abbrev=False)
    commands = group.add_subparsers(metavar="COMMAND", required=True, dest="schedule_command")
    names = "\n".join(f"  {name:<12} {record.about}" for name, record in ALL_SCHEDULES.items())
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    epilog = f"schedules:\n{names}\n  FILE.csv     a table of your own"

    show = commands.add_parser("show", help="draw a schedule in the terminal or into files", epilog=epilog, **layout)
    _add_schedule(show)
    show.add_argument("--png", metavar="FILE", type=Path, help="draw into a PNG file, with matplotlib")
    show.add_argument("--svg", metavar="FILE", type=Path, help="draw into an SVG file, with matplotlib")
    show.add_argument(
        "--html", metavar="FILE", type=Path, help="draw into an HTML file, with details under the pointer"
    )
    show.add_argument(
        "--csv", metavar="FILE", type=Path, help="write the table, which can be edited and given in place of a name"
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
        "--chunks", metavar="INT", type=_whole, help="stages on each rank, for interleaved (default: 2)"
    )


def _add_sizes(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--stages", metavar="INT", type=_whole, required=required, help="ranks in the pipeline, --pp of a run"
    )
    parser.add_argument("--micro-batches", metavar="INT", type=_whole, required=required, help="of a step, in total")
    parser.add_argument("--cost", metavar="F=1,...", type=_costs, default=Costs(), help=_COST_HELP)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from 1")
    return int(text)


def _costs(text: str) -> Costs:
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            cost = float(value)
        except ValueError:
            cost = math.nan
        if name.strip() not in _COST_FIELDS or not 0 <= cost < math.inf:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no cost; write {', '.join(f'{key}=1' for key in _COST_FIELDS)}"
            )
        given[_COST_FIELDS[name.strip()]] = cost
    costs = Costs(**given)
    backward = costs.input_gradient + costs.weight_gradient
    if costs.forward + backward <= 0:
        raise argparse.ArgumentTypeError("F, I and W cannot all be 0")
    least, most = max(costs.forward, backward), costs.forward + backward
    if costs.pair is not None and not least <= costs.pair <= most:
        raise argparse.ArgumentTypeError(
            f"FB={costs.pair:g} must be from {least:g}, the longer of its two, to {most:g}, one after the other"
        )
    return costs


def _schedule(options: argparse.Namespace) -> Schedule:
    """Return the schedule that was asked for, checked."""
    if options.name.endswith(".csv"):
        schedule = read_csv(options.name)
        asked = {"--stages": (options.stages, schedule.num_ranks), "--chunks": (options.chunks, None)}
        asked["--micro-batches"] = (options.micro_batches, schedule.num_micro_batches)
        for flag, (value, actual) in asked.items():
            if value not in (None, actual):
                raise ConfigError(
                    f"{flag} {value} contradicts {options.name}, which says itself what it is; leave it out"
                )
    else:
        if options.name not in ALL_SCHEDULES:
            raise ConfigError(
                f"schedule {options.name} is unknown; use {', '.join(ALL_SCHEDULES)} or a file with a table, FILE.csv"
            )
        if options.stages is None or options.micro_batches is None:
            raise ConfigError(f"schedule {options.name} needs its sizes; give --stages and --micro-batches")
        schedule = make_schedule(options.name, options.stages, options.micro_batches, options.chunks)
    check_schedule(schedule)
    return schedule


def _show(options: argparse.Namespace) -> int:
    from parallax.pipeline.draw import chart_of

    schedule = _schedule(options)
    chart = chart_of(schedule, simulate(schedule, options.cost))
    files = [path for path in (options.png, options.svg, options.html, options.csv) if path is not None]
    for path in files:
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if options.png is not None or options.svg is not None:
        from parallax.pipeline.draw.figure import save_figure

        for path, kind in ((options.png, "png"), (options.svg, "svg")):
            if path is not None:
                save_figure(chart, path, kind)
    if options.html is not None:
        from parallax.pipeline.draw.page import to_html

        _write(options.html, to_html(chart))
    if options.csv is not None:
        _write(options.csv, to_csv(schedule))
    for path in files:
        print(path)
    if not files:
        from rich.console import Console

        from parallax.pipeline.draw.terminal import to_text

        console = Console(width=shutil.get_terminal_size((120, 24)).columns, highlight=False)
        # With 16 colours kinds and tones would fall together; letters tell them apart.
        text = to_text(chart, console.width, colored=console.color_system in ("256", "truecolor"))
        console.print(text, soft_wrap=True)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _simulate(options: argparse.Namespace) -> int:
    schedule = _schedule(options)
    played = simulate(schedule, options.cost)
    if options.json:
        numbers = {"makespan": played.makespan, "bubble": max(played.bubble)}
        lists = {"bubble_per_rank": played.bubble, "peak_in_flight": played.peak_in_flight}
        json.dump(numbers | lists, sys.stdout)
        print()
        return 0
    worst = max(played.bubble)
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches"
    print(f"{schedule.name}: {sizes}")
    print(f"makespan {played.makespan:g}, bubble {worst:g} ({worst / played.makespan:.1%}) on the worst rank\n")
    print("rank    busy  bubble       in flight")
    for rank, (busy, bubble, held) in enumerate(zip(played.busy, played.bubble, played.peak_in_flight, strict=True)):
        print(f"{rank:>4} {busy:>7g} {bubble:>7g} {bubble / played.makespan:>6.1%} {held:>8}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    results, refused = [], []
    for name, record in ALL_SCHEDULES.items():
        for chunks in _COMPARED_CHUNKS if record.takes_chunks else (None,):
            try:
                schedule = make_schedule(name, options.stages, options.micro_batches, chunks)
            except ConfigError as error:
                refused.append(str(error))
                continue
            per_rank = schedule.num_stages / schedule.num_ranks
            played = simulate(schedule, _divided(options.cost, per_rank))
            results.append(_result(schedule, played, name, per_rank))
    results.sort(key=lambda result: result["makespan"])
    if options.json:
        json.dump(results, sys.stdout)
        print()
        return 0
    print("schedule      stages   makespan  bubble  in flight  weights  messages")
    for result in results:
        print(
            "{schedule:<12} {stages:>7} {makespan:>10.6g} {fraction:>7.1%} {share:>10.4g} {weights:>8.3g} {messages:>9}".format(
                fraction=result["bubble"] / result["makespan"], share=result["activations"], **result
            )
        )
    print(
        "\nbubble: of the worst rank. in flight: most activations on a rank, in micro-batches of a rank's share of the model.\n"
        "weights: on a rank, in such shares. messages: on all links together."
    )
    for reason in refused:
        print(f"left out: {reason}")
    return 0


def _divided(costs: Costs, parts: float) -> Costs:
    """Return the durations of one of `parts` equal stages; a message is as large as before."""
    return Costs(
        costs.forward / parts,
        costs.input_gradient / parts,
        costs.weight_gradient / parts,
        costs.latency,
        None if costs.pair is None else costs.pair / parts,
    )


def _result(schedule: Schedule, played: Simulation, name: str, per_rank: float) -> dict:
    consumers = (action for rank in range(schedule.num_ranks) for action in schedule.actions_of(rank))
    pairs = ((schedule.input_of(action), action) for action in consumers)
    messages = sum(
        source is not None and schedule.rank_of(source) != schedule.rank_of(action) for source, action in pairs
    )
    return {
        "schedule": name,
        "stages": schedule.num_stages,
        "makespan": played.makespan,
        "bubble": max(played.bubble),
        "activations": max(played.peak_in_flight) / per_rank,
        "weights": len(schedule.stages_of(0)) / per_rank,
        "messages": messages,
    }

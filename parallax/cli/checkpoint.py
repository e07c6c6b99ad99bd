"""`parallax checkpoint`: prove checkpoints, and list those of a run."""

from __future__ import annotations

import argparse
import sys

from parallax.errors import ConfigError
from parallax.storage import Location, location

_WHERE = "a run, as in runs/tiny or s3://bucket/run"


def add_commands(groups: argparse._SubParsersAction) -> None:
    """Add the parsers of this group."""
    group = groups.add_parser("checkpoint", help="prove checkpoints, list those of a run", allow_abbrev=False)
    commands = group.add_subparsers(metavar="COMMAND", required=True, dest="checkpoint_command")
    verify = commands.add_parser(
        "verify", help="read through all files and compare them with the checksums in the manifest"
    )
    verify.add_argument(
        "path", metavar="PATH", help=f"a checkpoint, as parallax checkpoint list names them, or all those of {_WHERE}"
    )
    verify.set_defaults(run=_verify)
    list_ = commands.add_parser(
        "list", help="list the checkpoints of a run, newest first, and whether their files are there"
    )
    list_.add_argument("folder", metavar="RUN", help=_WHERE)
    list_.set_defaults(run=_list)


def _verify(options: argparse.Namespace) -> int:
    place = location(options.path)
    try:
        return max(_verify_one(path) for path in _checkpoints_at(place))
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror or error}") from error


def _checkpoints_at(place: Location) -> list[Location]:
    """Return the checkpoint at a place, or all those of the run there, newest first."""
    from parallax.checkpoint.find import list_checkpoints
    from parallax.checkpoint.names import is_step

    if not place.is_dir():
        run = place.parent.parent if is_step(place.name) else place
        there = list_checkpoints(run / "checkpoints") if is_step(place.name) else []
        known = f"; {run} has {', '.join(path.name for _, path in there[:5])}" if there else ""
        raise ConfigError(
            f"there is no folder {place}{known}; give a checkpoint or {_WHERE}, whose checkpoints parallax checkpoint list shows"
        )
    if is_step(place.name) or (place / "manifest.json").is_file():
        return [place]
    found = [path for root in (place / "checkpoints", place) for _, path in list_checkpoints(root)]
    if not found:
        raise ConfigError(f"{place} holds no checkpoint; give one, or {_WHERE}")
    return found


def _verify_one(path: Location) -> int:
    from parallax.checkpoint.manifest import read_manifest
    from parallax.checkpoint.verify import verify

    problems = verify(path)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    manifest = read_manifest(path)
    size = sum(record.bytes for record in manifest.files.values())
    print(f"{path}: step {manifest.step}, {len(manifest.files)} files, {size / 2**20:.1f} MiB, as they were saved")
    return 0


def _list(options: argparse.Namespace) -> int:
    from parallax.checkpoint.find import list_checkpoints
    from parallax.checkpoint.manifest import read_manifest
    from parallax.checkpoint.verify import check_files

    run = location(options.folder)
    try:
        root = run / "checkpoints"
        if not root.is_dir() and not list_checkpoints(run):
            raise ConfigError(f"{run} holds no run: there is no folder {root}")
        found = list_checkpoints(root) or list_checkpoints(run)
    except OSError as error:
        raise ConfigError(f"{run} cannot be read: {error.strerror or error}") from error
    for step, path in found:
        try:
            manifest = read_manifest(path)
            problems = check_files(path, manifest)
            size = f"{sum(record.bytes for record in manifest.files.values()) / 2**20:10.1f} MiB"
        except (ConfigError, OSError) as error:
            problems, size = getattr(error, "problems", [str(error)]), f"{'?':>14}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        print(f"{step:>10}  {size}  {path}  {problems[0] + more if problems else 'complete'}")
    if not found:
        print(f"no checkpoints in {root}")
    return 0

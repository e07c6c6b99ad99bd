"""`parallax checkpoint`: prove a checkpoint, and list those of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parallax.errors import ConfigError


def add_commands(groups: argparse._SubParsersAction) -> None:
    """Add the parsers of this group."""
    group = groups.add_parser("checkpoint", help="prove a checkpoint, list those of a run", allow_abbrev=False)
    commands = group.add_subparsers(metavar="COMMAND", required=True, dest="checkpoint_command")
    verify = commands.add_parser(
        "verify", help="read through all files and compare them with the checksums in the manifest"
    )
    verify.add_argument(
        "path", metavar="PATH", type=Path, help="a checkpoint, as in runs/tiny/checkpoints/step-00000100"
    )
    verify.set_defaults(run=_verify)
    list_ = commands.add_parser(
        "list", help="list the checkpoints of a run, newest first, and whether their files are there"
    )
    list_.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, as in runs/tiny")
    list_.set_defaults(run=_list)


def _verify(options: argparse.Namespace) -> int:
    from parallax.checkpoint.manifest import read_manifest
    from parallax.checkpoint.verify import verify

    if not options.path.is_dir():
        raise ConfigError(f"{options.path} is no folder; give a checkpoint, as in runs/tiny/checkpoints/step-00000100")
    problems = verify(options.path)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    manifest = read_manifest(options.path)
    size = sum(record.bytes for record in manifest.files.values())
    print(
        f"{options.path}: step {manifest.step}, {len(manifest.files)} files, {size / 2**20:.1f} MiB, as they were saved"
    )
    return 0


def _list(options: argparse.Namespace) -> int:
    from parallax.checkpoint.find import list_checkpoints
    from parallax.checkpoint.manifest import read_manifest
    from parallax.checkpoint.verify import check_files

    root = options.folder / "checkpoints"
    if not root.is_dir():
        raise ConfigError(f"{options.folder} holds no run: there is no folder {root}")
    try:
        found = list_checkpoints(root)
    except OSError as error:
        raise ConfigError(f"{root} cannot be read: {error.strerror}") from error
    for step, path in found:
        try:
            manifest = read_manifest(path)
            problems = check_files(path, manifest)
            size = f"{sum(record.bytes for record in manifest.files.values()) / 2**20:10.1f} MiB"
        except ConfigError as error:
            problems, size = error.problems, f"{'?':>14}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        print(f"{step:>10}  {size}  {path}  {problems[0] + more if problems else 'complete'}")
    if not found:
        print(f"no checkpoints in {root}")
    return 0

"""The entry point of `parallax`; each group of commands is a module that adds its parsers and names their functions.

    parallax schedule show|simulate|compare ...      parallax.cli.schedule
    parallax checkpoint verify|list ...              parallax.cli.checkpoint
    parallax data build|show ...                     parallax.cli.data
    parallax generate MODEL ...                      parallax.cli.generate

A command returns its exit status: 0, or 1 if what it looked at is not good. What the user did wrong is one sentence on stderr
and status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from parallax.cli import checkpoint, data, generate, schedule
from parallax.errors import EXIT_INTERRUPTED, ConfigError, exit_with_problems
from parallax.flags import nearest

PROGRAM = "parallax"


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one sentence, without the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse here what this command does not know, since its own options are the ones that may have been meant."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and unknown[0].startswith("-"):
            name = unknown[0].partition("=")[0]
            known = [option.lstrip("-") for option in self._option_string_actions]
            raise ConfigError(f"{name} is no option of {self.prog}{nearest(name.lstrip('-'), known, '--')}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `run` in what it parses is the command's function."""
    parser = Parser(
        PROGRAM, description="Make token files, generate text, look at schedules and checkpoints.", allow_abbrev=False
    )
    groups = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    schedule.add_commands(groups)
    checkpoint.add_commands(groups)
    data.add_commands(groups)
    generate.add_commands(groups)
    return parser


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command that `words` (by default the command line) gives, and exit with its status."""
    try:
        words = sys.argv[1:] if words is None else words
        options = make_parser().parse_args(words or ["--help"])
        status = options.run(options)
        sys.stdout.flush()
    except ConfigError as error:
        exit_with_problems(error.problems, PROGRAM)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


if __name__ == "__main__":
    main()

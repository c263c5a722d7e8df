"""The commands, and the errors of all of them: one text on stderr, and the status 2."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence

import torch

from fshard import __version__
from fshard.errors import ShardingError, printable

from . import estimating, inspecting, launching, measuring, merging, planning

_COMMANDS = (inspecting, estimating, planning, measuring, launching, merging)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, the launched ranks', or 2 with the reason on stderr."""
    options = _parse(argv)
    try:
        result = options.run(options)
        if isinstance(result, str):
            print(printable(result), flush=True)
    except ShardingError as e:
        print(e, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except OSError as e:  # of a path that is too long, or a folder that may not be looked into
        print(f"{printable(str(e.filename))}: {e.strerror}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse_unknown(options.parser, unknown)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fshard",
        description="Look at models and their placement on a mesh, and run training on several devices.",
        epilog="python -m fshard COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"fshard {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    for command_parser in commands.choices.values():
        command_parser.set_defaults(parser=command_parser)
    return parser


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """End the program because of arguments that a command does not have: print its usage, and the nearest option.

    With the status 2, as argparse.
    """
    known = re.findall(r"(?<![\w-])--[\w-]+", parser.format_help())
    near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
    parser.error(f"there is no {unknown[0]}" + (f": {near[0]} is near" if near else ""))

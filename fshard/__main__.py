"""The command line: `python -m fshard COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .cli import inspect
from .errors import ShardingError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0, or 2 with the reason on stderr."""
    given = _parser().parse_args(argv)
    try:
        print(given.run(given), flush=True)
    except ShardingError as e:
        print(e, file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read it, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fshard", description="Look at models and how they lie on a mesh.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _inspect(commands.add_parser("inspect", help="print a tree: leaves, shapes, placement, source, bytes per device"))
    return parser


def _inspect(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("path", metavar="PATH", help="a Hugging Face folder, a config.json, a .safetensors file or a checkpoint")
    add("--mesh", default="", metavar="AXES", help="axis sizes: data=8,model=4")
    add("--specs", nargs="+", default=["auto"], metavar="RULE",
        help="auto (the model's own), or rules 'GLOB=P(...)' and .json files of them: the first match")  # fmt: skip
    add("--fully-shard", default="", metavar="AXIS", help="also split every leaf over this axis")
    add("--dtype", default="", help="cast floating leaves: bfloat16")
    add("--no-fold", action="store_true", help="show every layer")
    add("--raw", action="store_true", help="name tensors as the files do")
    command.set_defaults(run=lambda given: inspect(
        given.path, mesh=given.mesh, specs=given.specs, fully_sharded=given.fully_shard, dtype=given.dtype,
        fold=not given.no_fold, raw=given.raw))  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

"""The command line of `pretrain`: its arguments, and the reasons not to begin."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fshard as fs
from fshard import checkpoint

from .program import Program, flags

DESCRIPTION = "Pretrain a small GPT-2 on the source code of the Python that runs this, byte by byte."


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m fshard.recipes.pretrain", description=DESCRIPTION)
    p.add_argument("--mesh", default="",
                   help="axes and sizes, e.g. data=2,model=2 (default: data=1, or data=-1 under torchrun)")  # fmt: skip
    p.add_argument("--fsdp", action="store_true", help="shard parameters and optimizer state over data too")
    p.add_argument("--zero", action="store_true", help="shard the optimizer state alone over data (ZeRO-1)")
    p.add_argument("--sequence-parallel", action="store_true", help="split the residual stream along time over model")
    p.add_argument("--text", type=Path, help="train on this file instead of the standard library")
    p.add_argument("--steps", type=int, default=1900)
    p.add_argument("--batch", type=int, default=8, help="sequences per step, over all devices")
    p.add_argument("--context", type=int, default=128, help="tokens per sequence")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="to compute with; parameters stay float32",
    )
    p.add_argument("--compile", action="store_true", help="compile the whole step as one graph")
    p.add_argument("--remat", action="store_true", help="recompute blocks in the backward pass")
    p.add_argument("--verify", action="store_true", help="before training, compare the step on smaller meshes")
    p.add_argument("--out", type=Path, help="write metrics.jsonl and checkpoints here")
    p.add_argument(
        "--save-every", type=int, default=0, help="steps between checkpoints (the last step is always saved)"
    )
    p.add_argument("--resume", type=Path, help="resume from the last checkpoint in this folder, on any mesh; "
                   "auto: from that of --out, if there is one")  # fmt: skip
    p.add_argument("--sample", type=int, default=0, help="at the end, generate this many bytes of text")
    p.add_argument("--prompt", default="def ", help="the beginning of that text")
    return p


PROGRAM = Program("pretrain", parser)
stop, resume_hint = PROGRAM.stop, PROGRAM.resume_hint


# --- reasons not to begin -----------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. Ends the program, naming each argument that no run can have."""
    args = parser().parse_args(argv)
    least = {1: ("steps", "batch", "context", "layers", "heads", "width"), 0: ("save_every", "sample", "seed")}
    problems = PROGRAM.wrong_numbers(args, least, ("lr",))
    if not problems and args.width % args.heads:
        divisor = max(n for n in range(1, min(args.heads, args.width) + 1) if args.width % n == 0)
        problems.append(f"--heads {args.heads}: must divide --width, and {args.width} % {args.heads} = "
                        f"{args.width % args.heads}: give --heads {divisor}")  # fmt: skip
    if args.fsdp and args.zero:
        problems.append("--fsdp --zero: fully sharded parameters have a sharded optimizer state: give one of the two")
    if problems:
        raise stop("\n".join(problems))
    return args


def mesh_of(args: argparse.Namespace) -> fs.Mesh:
    """Make the mesh of a text like `data=2,model=2`; the default size of an axis is 1."""
    return PROGRAM.mesh_of(args, {"data": "batch", "model": "width"})


def check_folders(args: argparse.Namespace) -> tuple[int, dict[str, Any]] | None:
    """Return the step to resume from and the saved leaves. Ends the program for folders that do not fit the run."""
    PROGRAM.check_folders(args)
    try:
        return None if args.resume is None else _resumed(args)
    except OSError as e:
        raise stop(f"{e.filename}: {e.strerror}: give another folder") from None
    except fs.ShardingError as e:
        raise stop(e) from None


def _resumed(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    step = PROGRAM.last_saved(args)
    saved: dict[str, Any] = checkpoint.inspect(args.resume, step=step)
    try:
        wte, wpe, qkv = (saved[f"params.{name}"].shape for name in ("wte", "wpe", "h.0.qkv.w"))
        sizes = {"layers": len({k.split(".")[2] for k in saved if k.startswith("params.h.")}), "heads": qkv[2],
                 "width": wte[1], "context": wpe[0]}  # fmt: skip
    except (KeyError, AttributeError, IndexError):
        raise stop(
            f"--resume {args.resume}: pretrain did not save its step {step}: give a folder of pretrain"
        ) from None
    wrong = [name for name, n in sizes.items() if getattr(args, name) != n]
    if wrong:
        raise stop(f"--resume {args.resume}: the saved model does not have {flags(vars(args), wrong)}: "
                   f"give {flags(sizes, wrong)}")  # fmt: skip
    if step > args.steps:
        raise stop(f"--resume {args.resume}: it is at step {step}, after --steps {args.steps}: "
                   f"give --steps {step} or more")  # fmt: skip
    return step, saved

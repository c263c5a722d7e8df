"""The command line of a recipe: its options, the mesh, the folders it writes, and how a run that stops is resumed.

Every refusal is one line with what to change. All ranks end; rank 0 prints the line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

import fshard as fs
from fshard import checkpoint
from fshard._core.files.io import open_file
from fshard.cli.command import refuse_unknown

Run = TypeVar("Run", bound="Options")
R = TypeVar("R")
T = TypeVar("T")
Rule = tuple[Callable[[Any], bool], str]  # what holds for each value of an option, and what to give if it does not

PREEMPTED = 75  # exit status, EX_TEMPFAIL: the state is saved, and the program can go on
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ANY: Rule = (lambda _: True, "")
POSITIVE: Rule = (lambda x: 0 < x < math.inf, "give a number above 0")
RATE: Rule = (lambda x: 0 <= x < 1, "give a rate from 0 to below 1")
SEED: Rule = (lambda x: 0 <= x < 1 << 64, "give 0 or more, and less than 2^64")


class Refusal(Exception):  # noqa: N818  (a program ends with it, it does not fail)
    """A reason to end the program that all ranks have: `Options.run` prints it in one line."""


def at_least(least: int) -> Rule:
    """Return the rule of a number."""
    return lambda x: x >= least, f"give {least} or more"


def option(default: Any, text: str = "", *, rule: Rule = ANY, choices: Iterable[object] | None = None) -> Any:
    """Describe an option of a recipe: a field of a subclass of `Options`."""
    shown = {"help": text, "choices": None if choices is None else tuple(choices)}
    return dataclasses.field(default=default, metadata={"shown": shown, "rule": rule})


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def ranks_of_launcher() -> tuple[int, int]:
    """Return how many ranks there are, and how many of them on this node: both 1 without a launcher."""
    ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return (ranks, here) if "RANK" in os.environ else (1, 1)


def report(name: str, text: str) -> None:
    """Print a line about the end of a program, on rank 0."""
    if is_first():
        print(f"{name}: {text}", file=sys.stderr, flush=True)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass
class Options:
    """The options that all recipes have.

    A subclass adds a recipe's: each field is an option of the command line; the first line of the docstring is its
    description.
    """

    name: ClassVar[str]
    may_differ: ClassVar[Sequence[str]]  # options that a resumed run may change
    parts: ClassVar[Sequence[str]] = ("",)  # folders of checkpoints, inside the folder of the run

    mesh: str = option("", "axes and sizes, e.g. data=2,model=2 (default: data=1, or data=-1 under torchrun)")
    steps: int = option(0, rule=at_least(1))
    batch: int = option(0, "examples of a step, over all devices", rule=at_least(1))
    lr: float = option(0.0, "peak learning rate", rule=POSITIVE)
    seed: int = option(0, rule=SEED)
    out: Path | None = option(None, "write metrics.jsonl and checkpoints here")
    save_every: int = option(0, "steps between checkpoints (the last step is always saved)", rule=at_least(0))
    resume: Path | None = option(
        None, "resume from the last checkpoint in this folder, on any mesh; auto: from --out, if it has one"
    )

    # --- the command line ---------------------------------------------------------------------------------------------

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        description = (cls.__doc__ or "").splitlines()[0]
        p = argparse.ArgumentParser(prog=f"python -m fshard.recipes.{cls.name}", description=description)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind, shown = hints[field.name], field.metadata["shown"]
            if kind is bool:
                p.add_argument(flag(field.name), action="store_true", help=shown["help"])
            else:
                kind = next((t for t in typing.get_args(kind) if t is not type(None)), kind)
                p.add_argument(flag(field.name), type=kind, default=field.default, **shown)
        return p

    @classmethod
    def parse(cls: type[Run], argv: Sequence[str] | None) -> Run:
        """Parse the options. Refuses each value that no run can have."""
        parser = cls.parser()
        found, unknown = parser.parse_known_args(argv)
        if unknown:
            refuse_unknown(parser, unknown)
        options = cls(**vars(found))
        if problems := options.problems():
            raise Refusal("\n".join(problems))
        return options

    @classmethod
    def run(cls: type[Run], f: Callable[[Run], R], argv: Sequence[str] | None) -> R:
        """Call `f` with the options. An interrupt, a `Refusal` and a `ShardingError` end the program with one line."""
        options = None
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        try:
            options = cls.parse(argv)
            return f(options)
        except KeyboardInterrupt:
            report(cls.name, f"interrupted; {options.resume_hint() if options else 'nothing is saved'}")
            raise SystemExit(130) from None
        except (Refusal, fs.ShardingError) as e:
            line = "; ".join(line.strip() for line in str(e).splitlines())
            raise SystemExit(f"{cls.name}: {line}" if is_first() else 1) from None
        finally:
            for number, handler in handlers.items():  # for a caller that goes on
                if signal.getsignal(number) != handler:
                    signal.signal(number, handler)

    def problems(self) -> list[str]:
        """Return a line for each value that no run can have. Recipes add theirs."""
        problems = []
        for field in dataclasses.fields(self):
            holds, fix = field.metadata["rule"]
            if not holds(getattr(self, field.name)):
                problems.append(f"{self.flags([field.name])}: {fix}")
        if self.save_every and not (self.out or self.resume):
            problems.append(f"--save-every {self.save_every}: give the folder too, --out FOLDER")
        if str(self.resume) == "auto" and not self.out:
            problems.append("--resume auto: give the folder too, --out FOLDER")
        return problems

    def flags(self, names: Sequence[str], values: Mapping[str, object] | None = None) -> str:
        """Return options in the form of the command line: with the values of this run, or others."""
        return " ".join(f"{flag(name)} {(values or vars(self)).get(name)}" for name in names)

    # --- the mesh -----------------------------------------------------------------------------------------------------

    def axes(self) -> dict[str, str]:
        """Return the axes of the mesh, and for each the option that is divided over it, or ""."""
        return {"data": "batch", "model": "batch"}

    def make_mesh(self) -> fs.Mesh:
        """Make the mesh of a text like `data=2,model=2`; the default size of an axis is 1."""
        axes = self.axes()
        sizes: dict[str, int] = {}
        for part in filter(None, self.mesh.split(",")):
            match = re.fullmatch(rf"({'|'.join(axes)})=(-1|\d+)", part)
            if match is None:
                raise Refusal(f"--mesh {self.mesh}: {part!r} is not {' or '.join(f'{axis}=N' for axis in axes)}")
            if match[1] in sizes:
                raise Refusal(f"--mesh {self.mesh}: {match[1]!r} appears twice")
            sizes[match[1]] = int(match[2])
        for axis, divided in axes.items():
            if divided and sizes.get(axis, 1) > getattr(self, divided):
                raise Refusal(f"--mesh {self.mesh}: {axis}={sizes[axis]} ranks have nothing to do with "
                              f"{self.flags([divided])}: give at most {axis}={getattr(self, divided)}")  # fmt: skip
        default: dict[str, Any] = dict.fromkeys(axes, 1)
        if "RANK" in os.environ and not self.mesh:
            default[[axis for axis in axes if axis != "model"][-1]] = -1
        try:
            mesh = fs.make_mesh(**{**default, **sizes})
        except fs.ShardingError as e:
            raise Refusal(f"--mesh {self.mesh}: {e}") from None
        if vars(self).get("compile") and mesh.kind == "simulated" and mesh.size > 1:
            raise Refusal(f"--compile --mesh {self.mesh}: the ranks are threads, which one compiler serves: "
                          f"give one of the two, or run torchrun --nproc-per-node {mesh.size}")  # fmt: skip
        return mesh

    # --- the folders --------------------------------------------------------------------------------------------------

    def saved(self, folder: Path) -> int | None:
        """Return the last saved step in a folder, or None; for a run in parts, the last part's."""
        steps = [checkpoint.latest(folder / part) for part in self.parts]
        return next((step for step in reversed(steps) if step is not None), None)

    def resumes_in_place(self) -> bool:
        """Return whether the run goes on in the folder that it resumes from."""
        return self.resume is not None and (
            self.out is None or os.path.realpath(self.out) == os.path.realpath(self.resume)
        )

    def check_folders(self) -> int:
        """Return the step to resume from, or 0. Refuses folders that cannot be written or that hold another run.

        `--resume auto` becomes the folder of `--out` if that has a checkpoint, and no `--resume` otherwise.
        """
        try:
            if str(self.resume) == "auto" and self.out:
                self.resume = self.out if self.saved(self.out) is not None else None
            if self.out and not self.resumes_in_place() and self.saved(self.out) is not None:
                raise Refusal(f"--out {self.out} holds a run, up to step {self.saved(self.out)}: "
                              f"give --resume {self.out}, or another folder")  # fmt: skip
            for name, folder in (("resume", self.resume), ("out", self.out)):
                if folder is None:
                    continue
                existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
                if not existing.is_dir():
                    raise Refusal(f"--{name} {folder}: {existing} is a file: give a folder")
                if not os.access(existing, os.W_OK | os.X_OK):
                    raise Refusal(f"--{name} {folder}: {existing} cannot be written: give another folder")
            if self.resume is None:
                return 0
            step, parent = self.saved(self.resume), self.resume.absolute().parent
            if step is None:
                fix = f": give --resume {parent}" if self.saved(parent) is not None else ""
                raise Refusal(f"--resume {self.resume}: there is no complete checkpoint in it{fix}")
        except OSError as e:
            raise Refusal(f"{e.filename}: {e.strerror}: give another folder") from None
        if step > self.steps:
            raise Refusal(f"--resume {self.resume}: it is at step {step}, after --steps {self.steps}: "
                          f"give --steps {step} or more")  # fmt: skip
        return step

    def check_same_run(self, **facts: tuple[object, str]) -> None:
        """Write the options next to the checkpoints, or refuse if the resumed run has others.

        Each of `facts` has a value, and the options that give the same one.
        """
        free = {"mesh", "out", "save_every", "resume", *self.may_differ}
        now: dict[str, object] = {name: str(value) for name, value in vars(self).items() if name not in free}
        now |= {name: value for name, (value, _) in facts.items()}
        if self.resume:
            try:
                with open_file(self.resume / "arguments.json") as f:
                    saved = json.load(f)
            except (OSError, ValueError) as e:
                raise Refusal(f"--resume {self.resume}: {e}: give a folder of {self.name}") from None
            if not isinstance(saved, dict) or saved.keys() != now.keys():
                raise Refusal(f"--resume {self.resume}: {self.name} did not write its arguments.json: "
                              f"give a folder of {self.name}")  # fmt: skip
            differ = [name for name in now if saved[name] != now[name]]
            if differ:
                fixes = " ".join(facts[n][1] if n in facts else self.flags([n], saved) for n in differ)
                raise Refusal(f"--resume {self.resume}: it was trained with other arguments: give {fixes}")
        if self.out and not self.resumes_in_place() and is_first():
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                (self.out / "arguments.json").write_text(json.dumps(now, indent=2, sort_keys=True))
            except OSError as e:
                raise Refusal(f"--out {self.out}: {e.strerror}: give another folder") from None

    # --- the end of a run ---------------------------------------------------------------------------------------------

    def resume_hint(self) -> str:
        """Return the last saved step and the command that resumes there; or how to save, if nothing is saved."""
        for folder in filter(None, (self.out, self.resume)):
            step = self.saved(folder)
            if step is not None:
                ranks, here = ranks_of_launcher()
                where = "" if ranks == here else "on every node, with its --rdzv arguments, "
                return f"step {step} is saved: resume {where}with {self._resume_command(folder)}"
        return "nothing is saved yet: --out FOLDER --save-every N save checkpoints"

    def _resume_command(self, folder: Path) -> str:
        command = ["python", "-m", f"fshard.recipes.{self.name}", "--resume", str(folder)]
        if self.out not in (None, folder):
            command += ["--out", str(self.out)]
        if "RANK" in os.environ:
            ranks, here = ranks_of_launcher()
            nodes = [] if ranks == here else ["--nnodes", str(ranks // here)]
            command[:2] = ["torchrun", *nodes, "--nproc-per-node", str(here), "-m"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in ("out", "resume", "verify"):
                command += [flag(field.name), *([] if value is True else [str(value)])]
        return shlex.join(command)

    def save(
        self, mesh: fs.Mesh, folder: Path | None, state: Any, *, step: int, steps: int, **metrics: float
    ) -> None:  # fmt: skip
        """Save the state after `step` steps, if there is a folder, after each `--save-every` steps and the last.

        Also if the program is told to end, which it then does. Ends it too if the state or the metrics of the step are
        not finite, or the state cannot be written: earlier checkpoints stay, and the line has the command to resume.
        """
        told = fs.preempted(mesh)
        due = folder is not None and (told or step == steps or (self.save_every and step % self.save_every == 0))
        wrong = [f"{name} is {x}" for name, x in metrics.items() if not math.isfinite(x)]
        if due or wrong:
            leaf = not_finite(state)
            if leaf or (wrong and "scale" not in state["opt"]):  # a loss scale skips such a step
                raise Refusal(f"step {step - 1}: {', '.join([*wrong, *leaf])}: the run would end here again: give a "
                              f"lower --lr\n{self.resume_hint()}")  # fmt: skip
        if folder is not None and due:
            try:
                checkpoint.save(folder, state, step=step, overwrite=True)
            except fs.ShardingError as e:
                raise Refusal(f"{e}\n{self.resume_hint()}") from None
        if told:
            raise self._told_to_end()

    def until_told(self, mesh: fs.Mesh, items: Iterable[T]) -> Iterator[T]:
        """Yield the items of a loop that saves nothing, until the program is told to end, which it then does."""
        for item in items:
            yield item
            if fs.preempted(mesh):
                raise self._told_to_end()

    def _told_to_end(self) -> SystemExit:
        """Return the exit of a program that was told to end; rank 0 prints how to resume."""
        report(self.name, f"told to end; {self.resume_hint()}")
        return SystemExit(PREEMPTED if self.out or self.resume else 1)

    def verify_step(self, step: Any, say: Callable[..., None], *args: Any) -> None:
        """Compare the step on smaller meshes. Ends the program with all lines if an answer changes."""
        try:
            say(str(fs.verify(step, *args)), markup=False)
        except fs.ShardingError as e:
            raise SystemExit(f"{self.name}: {e}" if is_first() else 1) from None


def not_finite(state: Any) -> list[str]:
    """Return a text about the first leaf with a NaN or an infinity, parameters before the rest; empty if none has."""
    text = ""
    for part in (state, {"params": state["params"]}):
        try:
            fs.validate(part)
        except fs.ShardingError as e:
            text = next(line for line in str(e).splitlines() if line.startswith("validate: "))
    return [text.replace("validate: tree", "state")] if text else []

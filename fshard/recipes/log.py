"""The metrics of a run: a line of JSON for each step, and its progress on the screen."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fshard._core.files.io import open_file

from .command import Options, Refusal, is_first


def printer() -> Callable[..., None]:
    """Return the function that prints on rank 0, and does nothing on others."""
    return Console(highlight=False, soft_wrap=True, quiet=not is_first()).print


class Log:
    """Writes metrics.jsonl and shows progress, on rank 0 only: a bar on a terminal, plain lines elsewhere."""

    def __init__(
        self, args: Options, begin: int, steps: int, say: Callable[..., None], folder: Path | None,
        unit: str = "tokens",
    ) -> None:  # fmt: skip
        self.args, self.begin, self.steps, self.say = args, begin, steps, say
        self.first, self.folder, self.unit = is_first(), folder, unit
        self.file = None
        if folder and self.first:
            with self.errors():
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / "metrics.jsonl"
                earlier = [line for step, line in read_metrics(path) if step < begin and args.resumes_in_place()]
                new = path.with_name(".metrics.jsonl.new")  # renamed: a kill loses no line
                new.write_text("".join(earlier))
                os.replace(new, path)
                self.file = path.open("a")
        self.bar: Progress | None = None
        self.recent: list[float] = []

    def __enter__(self) -> Log:
        if self.first and sys.stdout.isatty():
            text = TextColumn("{task.completed}/{task.total}  {task.description}")
            self.bar = Progress(BarColumn(), text, TimeRemainingColumn())
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps, completed=self.begin)
        self.clock = time.perf_counter()
        return self

    def write(self, **metrics: float) -> None:
        if not self.first:
            return
        if self.file:
            with self.errors():
                values = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # JSON has no NaN
                self.file.write(json.dumps(values, allow_nan=False) + "\n")
                self.file.flush()
        step = int(metrics["step"])
        self.recent = [*self.recent[-49:], metrics[f"{self.unit}_per_s"]]
        speed = sorted(self.recent)[len(self.recent) // 2]
        rate = f"{speed / 1e3:.1f}k" if speed >= 1000 else f"{speed:.0f}"
        summary = f"loss {metrics['loss']:.3f}  {rate} {self.unit}/s"
        if self.bar:
            self.bar.update(self.task, completed=step + 1, description=summary)
        elif step % 100 == 0 or step + 1 == self.steps:
            left = (time.perf_counter() - self.clock) / (step + 1 - self.begin) * (self.steps - step - 1)
            self.say(f"step {step:5d}  {summary}  {left:.0f} s left")

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
        if self.file:
            with contextlib.suppress(OSError):  # of a full disk, for the line that could not be written
                self.file.close()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise Refusal(f"cannot write metrics.jsonl: {e.strerror}: make room\n{self.args.resume_hint()}") from None


def read_metrics(path: Path) -> list[tuple[int, str]]:
    """Return (step, line) for every line of metrics.jsonl, but a last one that a kill or a full disk has cut short."""
    if not path.exists():
        return []
    with open_file(path) as f:
        lines = f.read().decode(errors="replace").splitlines(keepends=True)
    out = []
    for i, line in enumerate(lines):
        try:
            out.append((int(json.loads(line)["step"]), line))
        except (ValueError, KeyError, TypeError):
            if i + 1 < len(lines) or line.endswith("\n"):
                raise Refusal(f"{path}: line {i + 1} is damaged: remove it, or move the file away") from None
    return [(step, line) for step, line in out if line.endswith("\n")]

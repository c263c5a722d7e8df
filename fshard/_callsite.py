"""The user's line that is being executed: where it is, and how it reads.

A check deep inside torch finds the frame of the user's code and the columns of the expression that this frame is
executing. Source is read only when it is shown; where there is none, answers are empty, never an exception.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sys
import sysconfig
import unicodedata
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

PACKAGE = __name__.partition(".")[0]
HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
PROGRAMS = tuple(os.path.join(HERE, name, "") for name in ("models", "recipes"))  # written to be copied: a user's
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](\w+)")
PLUMBING = ("einops", "functorch", "numpy", "opt_einsum", "optree", "torch", "torchgen")
GENERATED = ("<frozen ", "<eval_with_key", "<__array_function__", "<@", "<attrs generated")  # code without lines


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user's code: not of torch, optree, this library or the standard library.

    `start` is where to look from, outwards: by default the caller. A backward pass on CUDA runs on autograd's threads,
    where no user's frame is: then start at `sys._current_frames()[ident]` of the thread that began it.
    """
    frame: FrameType | None = sys._getframe(1) if start is None else start
    known = _verdicts
    while frame is not None and not known[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


class _Verdicts(dict[str, bool]):
    """Whether a file is of the user's code, found out once: a loop over a stack must be fast."""

    def __missing__(self, file: str) -> bool:
        if file.startswith((HERE, TORCH, *GENERATED)):
            return self.setdefault(file, file.startswith(PROGRAMS))
        package = INSTALLED.search(file)
        return self.setdefault(file, package[1] not in PLUMBING if package else not file.startswith(STANDARD))


_verdicts = _Verdicts()


@dataclass(frozen=True, slots=True, repr=False)
class Site:
    """One place in a program: an instruction of a code object. Its `str` is `train.py:14 in loss_fn`."""

    code: CodeType
    lasti: int

    @property
    def columns(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First and last line, from 1, and first and last column, in bytes, of what is executed."""
        nowhere = (None, None, None, None)
        return next(itertools.islice(self.code.co_positions(), self.lasti // 2, None), nowhere)  # 2 bytes each

    @property
    def file(self) -> str:
        """The file's full name."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """The line, from 1."""
        return self.columns[0] or self.code.co_firstlineno

    @property
    def function(self) -> str:
        """The function's name; that of the function around a comprehension."""
        parts = [p for p in self.code.co_qualname.split(".") if p == "<lambda>" or not p.startswith("<")]
        return parts[-1] if parts else "<module>"

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        name = self.file if self.file.startswith("<") else os.path.basename(self.file)
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
        if "ipykernel" in self.file and get_ipython and (shell := get_ipython()):  # a cell is shown by its number
            name = (shell.compile.format_code_name(self.file) or ("", name))[1]
        return f"{name}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")


def site(frame: FrameType | None = None) -> Site | None:
    """Where the user's code is now; or where this frame is."""
    frame = user_frame(sys._getframe(1)) if frame is None else frame
    return None if frame is None else Site(frame.f_code, frame.f_lasti)


def quote(site: Site) -> str:
    """The line of the executing expression, without indentation, and ^^^^ under as much of it as is on that line."""
    line, last, column, end = site.columns
    text = "".join(text_of(site.file).split("\n")[site.line - 1 : site.line]).rstrip()
    if (shown := text.lstrip()) == "" or column is None:
        return shown
    start = len(text.encode()[:column].decode(errors="ignore"))  # columns are bytes
    inside = text.encode()[: end if line == last else None].decode(errors="ignore")[start:]
    return f"{shown}\n{_drawn(' ', text[len(text) - len(shown) : start])}{_drawn('^', inside)}"


def _drawn(mark: str, under: str) -> str:
    return "".join(c if c == "\t" else mark * (1 + (unicodedata.east_asian_width(c) in "WF")) for c in under)


def text_of(file: str, names: dict[str, Any] | None = None) -> str:
    linecache.checkcache(file)
    return "".join(linecache.getlines(file, names)).replace("\r\n", "\n")

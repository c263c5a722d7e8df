"""The line of the user's code that is executing: its place and its source.

A check deep inside torch finds the frame of the user's code, and the columns of the expression that the frame executes.
Source is read only when it is shown; the text is empty if it is not found.
"""

from __future__ import annotations

import functools
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
HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
MODELS = os.path.join(HERE, "models", "")
FOLDERS = os.path.join(MODELS, "hf.py")  # `fs.hf`, which finds the model file of a folder, is not an example
EXAMPLES = (MODELS, os.path.join(HERE, "recipes", ""))  # files to copy: a user's code
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
STANDARD_LIBRARY = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](\w+)")
SKIPPED_PACKAGES = ("IPython", "einops", "functorch", "ipykernel", "numpy", "opt_einsum", "optree", "torch", "torchgen",
                    "typing_extensions")  # fmt: skip
GENERATED = ("<frozen ", "<eval_with_key", "<__array_function__", "<@", "<attrs generated")  # files of generated code


def user_frame(start: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of the user's code: not of torch, optree, this library or the standard library.

    The search begins at `start`, by default the caller, and goes outwards. A backward pass on CUDA runs on autograd's
    threads, which have no frame of the user: then begin at `sys._current_frames()[ident]` of the thread that called it.
    """
    frame: FrameType | None = sys._getframe(1) if start is None else start
    is_users = _is_users_file
    while frame is not None and not is_users[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def is_users_frame(frame: FrameType) -> bool:
    """Return whether a frame is of the user's code, as `user_frame` finds it."""
    return _is_users_file[frame.f_code.co_filename]


def caller_of_models(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called into fshard.models, if `frame` is inside it: its arguments are wrong."""
    caller = frame
    while caller is not None and caller.f_code.co_filename.startswith(MODELS):
        caller = user_frame(caller.f_back)
    return caller or frame


class _IsUsersFile(dict[str, bool]):
    """Cache, by file name, of whether a file is the user's code: a dict, since a search of the stack must be fast."""

    def __missing__(self, file: str) -> bool:
        if file.startswith((HERE, TORCH, *GENERATED)):
            return self.setdefault(file, file.startswith(EXAMPLES) and file != FOLDERS)
        package = INSTALLED.search(file)
        if package:
            return self.setdefault(file, package[1] not in SKIPPED_PACKAGES)
        return self.setdefault(file, not file.startswith(STANDARD_LIBRARY))


_is_users_file = _IsUsersFile()


@functools.cache
def is_own_file(file: str) -> bool:
    """Return whether a file is the user's: not of torch, fshard, the standard library or an installed package."""
    return not (file.startswith((HERE, TORCH, *STANDARD_LIBRARY, *GENERATED)) or INSTALLED.search(file))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the global names and attributes in the code of a function and of the functions inside it."""
    return frozenset(code.co_names).union(*(names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def package_of(site: Site | None) -> str:
    """Return the installed package of a line, which the user does not edit: `transformers`; "" for other lines."""
    found = INSTALLED.search(site.file) if site else None
    return found[1] if found and found[1] != PACKAGE else ""


@dataclass(frozen=True, slots=True, repr=False)
class Site:
    """One instruction of a code object. Its `str` is `train.py:14 in loss_fn`; its `repr` begins with the caller.

    `caller`: of an instruction in fshard.models, the user's line that called into it.
    """

    code: CodeType
    lasti: int
    caller: Site | None = None

    @property
    def lines(self) -> str:
        """Return the user's line, and below it the model's line if the instruction is there."""
        return f"{self.caller}\n{self}" if self.caller else str(self)

    def __hash__(self) -> int:  # not by the code object, whose hash visits its constants and names
        return hash((self.code.co_name, self.code.co_firstlineno, self.lasti))

    @property
    def columns(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First and last line, from 1, and first and last column, in bytes, of the expression that executes."""
        unknown = (None, None, None, None)
        instruction = self.lasti // 2  # of 2 bytes each
        return next(itertools.islice(self.code.co_positions(), instruction, None), unknown)

    @property
    def file(self) -> str:
        """Full name of the file."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """Line number, from 1."""
        return self.columns[0] or self.code.co_firstlineno

    @property
    def function(self) -> str:
        """Name of the function; of a comprehension, the name of the function around it."""
        parts = [p for p in self.code.co_qualname.split(".") if p == "<lambda>" or not p.startswith("<")]
        return parts[-1] if parts else "<module>"

    def __repr__(self) -> str:
        return f"{self.caller} ({self})" if self.caller else str(self)

    def __str__(self) -> str:
        name = self.file if self.file.startswith("<") else os.path.basename(self.file)
        get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
        if "ipykernel" in self.file and get_ipython and (shell := get_ipython()):  # a cell has a number
            name = (shell.compile.format_code_name(self.file) or ("", name))[1]
        return f"{name}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")


_MOST_SITES = 10_000
# By the ids of the code objects of a line and of the caller of its model, which the site keeps, and their instructions.
_sites: dict[tuple[int, int, int, int], Site] = {}


def site(frame: FrameType | None = None) -> Site | None:
    """Return the place that a frame executes; by default the user's innermost frame."""
    frame = user_frame(sys._getframe(1)) if frame is None else frame
    if frame is None:
        return None
    in_models = frame.f_code.co_filename.startswith(MODELS)
    caller = (caller_of_models(frame) if in_models else None) or frame
    known = _sites.get(key := (id(frame.f_code), frame.f_lasti, id(caller.f_code), caller.f_lasti))
    if known is None:
        if len(_sites) > _MOST_SITES:
            _sites.clear()
        called = None if caller is frame else Site(caller.f_code, caller.f_lasti)
        known = _sites[key] = Site(frame.f_code, frame.f_lasti, called)
    return known


def quote(site: Site) -> str:
    """Return the line of the executing expression, unindented, and ^^^^ under the expression's part of the line."""
    first, last, start, end = site.columns
    text = "".join(text_of(site.file).split("\n")[site.line - 1 : site.line]).rstrip()
    shown = text.lstrip()
    if not shown or start is None:
        return shown
    before = text.encode()[:start].decode(errors="ignore")  # columns count bytes
    marked = text.encode()[start : end if first == last else None].decode(errors="ignore")
    return f"{shown}\n{_fill(' ', before[len(text) - len(shown) :])}{_fill('^', marked)}"


def place_and_source(site: Site | None) -> tuple[str, ...]:
    """Return the lines of an error that name a place and quote its source."""
    return () if site is None else (str(site), *(f"  {text}" for text in quote(site).splitlines()))


def _fill(mark: str, text: str) -> str:
    """Return as many marks as the text is wide on a terminal."""
    return "".join(c if c == "\t" else mark * (1 + (unicodedata.east_asian_width(c) in "WF")) for c in text)


def text_of(file: str, module_globals: dict[str, Any] | None = None) -> str:
    """Return the source of a file, of a notebook cell, or of a module whose loader has it; else ""."""
    linecache.checkcache(file)
    return "".join(linecache.getlines(file, module_globals)).replace("\r\n", "\n")

"""The line of a mistake, as it is marked in a wrong program, and as an error of `verify` names it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def marked_lines(f: Callable[..., Any]) -> list[str]:
    """Return the places, file:line, that are marked `# BUG` in a function."""
    f = inspect.unwrap(f)
    lines, first = inspect.getsourcelines(f)
    return [f"{Path(inspect.getfile(f)).name}:{first + i}" for i, line in enumerate(lines) if "# BUG" in line]


def names_the_line(text: str, wrong: Callable[..., Any]) -> bool:
    """Return whether an error names a marked line: where a value is the first to differ, or as a caller of that line.

    Or as the line that reads a number by which ranks differ, or by the error of the types.
    """
    located = text.partition("\n  first different line")[2]
    places = re.findall(r"(?:: |called at |is read at |fix: at )(\w+\.py:\d+)", located)
    return not set(places).isdisjoint(marked_lines(wrong))

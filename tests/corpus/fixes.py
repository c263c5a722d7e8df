"""Apply the fix that an error prints to the source of the program, as a person would who trusts the message."""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One of the fixes of a message: the text of a line that replaces the line `number` of a file."""

    file: str
    number: int
    condition: str  # "" where the message names no alternative
    line: str  # "" to delete it
    is_new: bool = False  # the line is inserted before line `number`


def options(message: str) -> list[Option]:
    """Return the fixes of the first error of a message that name a line of code."""
    lines = message.splitlines()
    place = next((m for line in lines if (m := re.match(r"([\w.-]+\.py):(\d+)", line))), None)
    if place is None:
        return []
    found = []
    first = next((i for i, line in enumerate(lines) if line.startswith("  fix: ")), len(lines))
    for line in [*lines[first : first + 1], *(x for x in lines[first + 1 : first + 5] if x.startswith("  or, "))]:
        text = line.removeprefix("  fix: ").removeprefix("  or, ")
        condition, _, code = text.rpartition(":  ")
        before_line = code.endswith(", before its first use")
        code = code.removesuffix(", before its first use")
        at = re.match(r"at ([\w.-]+\.py):(\d+)", condition) or place
        if code == "delete this line":
            found.append(Option(at[1], int(at[2]), condition, ""))
        elif _is_code(code):
            found.append(Option(at[1], int(at[2]), condition, code, before_line))
    return found


def _is_code(text: str) -> bool:
    try:
        compile(
            re.sub(r"^(if|elif|for|while|with|def) (.*:)$", r"\1 \2 pass", text.replace("return ", "", 1)), "", "exec"
        )
    except SyntaxError:
        return False
    return "..." not in text and re.search(r"[(=]|return ", text) is not None


def applied(source: str, option: Option) -> str | None:
    """Return a source with the line replaced; None where that gives no program."""
    lines = source.split("\n")
    old = lines[option.number - 1]
    comment = re.search(r"  # BUG.*$", old)
    indent = old[: len(old) - len(old.lstrip())]
    new_line = f"{indent}{option.line or 'pass'}"
    lines[option.number - 1] = f"{new_line}\n{old}" if option.is_new else f"{new_line}{comment[0] if comment else ''}"
    new = "\n".join(lines)
    try:
        compile(new, "", "exec")
    except SyntaxError:
        return None
    return new


_versions: Iterator[int] = iter(range(10**9))


def loaded(module: Any, source: str) -> types.ModuleType:
    """Return a module made from another version of its source, in a file name of its own."""
    name = f"{Path(module.__file__).stem}_{next(_versions)}.py"
    new = types.ModuleType(module.__name__)
    new.__file__ = name
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), vars(new))
    return new

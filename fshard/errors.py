"""The exception that users see, and the form of its message: what, where, the facts, the arithmetic, the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence


class ShardingError(ValueError):
    """Error of a program that fshard refuses. The message says what and where, shows the facts and names the fix."""


def fail(what: str, *notes: str, fix: str = "", **facts: object) -> ShardingError:
    """Return one error: `what` on the first line, then the facts on one aligned line, the notes, the fix.

    >>> print(fail("cannot do that", "3 + 3 != 7", fix="use 6", shape="f32[3]", spec="P()"))
    cannot do that
      shape  f32[3]    spec  P()
      3 + 3 != 7
      fix: use 6
    """
    lines = [what]
    if facts:
        lines.append("  " + "    ".join(f"{name}  {value}" for name, value in facts.items()))
    lines += [f"  {line}" for note in notes for line in note.splitlines()]
    if fix:
        lines.append(f"  fix: {fix}")
    return ShardingError("\n".join(lines))


def raise_all(errors: Sequence[ShardingError]) -> None:
    """Raise every collected error as one, so that a user sees all failing leaves at once; nothing if there is none.

    Errors that differ only in an index, as those of the blocks of a model do, are told once.
    """
    if len(errors) == 1:
        raise errors[0]
    groups: dict[str, list[str]] = {}
    for e in errors:
        groups.setdefault(_INDEX.sub("*", str(e)), []).append(str(e))
    texts = [_told_once(group) for group in groups.values()]
    if texts:
        raise ShardingError(texts[0] if len(texts) == 1 else f"{len(texts)} problems\n" + "\n".join(texts))


_INDEX = re.compile(r"(?<=[.\[])\d+(?=[.\]])")  # of a block: `['blocks'][3]['up']`, `h.3.attn.weight`


def _told_once(errors: Sequence[str]) -> str:
    """Return the first of errors that differ in an index, and the words of the others' first lines that differ."""
    first, *others = [e.partition("\n")[0].split() for e in errors]
    names = [" ".join(a for a, b in zip(words, first, strict=False) if a != b).rstrip(":,") for words in others]
    return errors[0] if not others else f"{errors[0]}\n  the same for {join_limited(names, 3)}"


def join_limited(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join the first `limit` items, and say how many more there are.

    >>> join_limited(["a", "b", "c"], 2)
    'a, b, and 1 more'
    """
    rest = len(items) - limit
    return separator.join(items[:limit]) + (f"{separator.rstrip()} and {rest} more" if rest > 0 else "")

"""The tables of docs/neighbours.md, from the stored verdicts of the other systems and the fields of the corpus.

`python -m tests.corpus.neighbours.table` writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.corpus.neighbours.programs import Entry, entries

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "neighbours.md"
SYSTEMS = ("jax", "spmd_types")
WRONG = ("caught", "right", "silent", "n/a")
CORRECT = ("passes", "false alarm", "n/a")
OURS = ("types", "verify", "nothing")


def stored(system: str) -> dict[str, Any]:
    """Return the versions, and the [verdict, detail] of each program."""
    return json.loads((HERE / f"{system}.json").read_text())


def tables() -> dict[str, str]:
    """Return each table of the page, by the name of its marker."""
    verdicts = {system: {k: v for k, (v, _) in stored(system)["verdicts"].items()} for system in SYSTEMS}
    compared = [e for e in entries() if all(e.name in v for v in verdicts.values())]
    wrong, correct = [e for e in compared if e.is_wrong], [e for e in compared if not e.is_wrong]

    def counts(rows: Sequence[Entry], system: str, kinds: Sequence[str]) -> list[int]:
        found = Counter(verdicts[system][e.name] for e in rows)
        return [found[k] for k in kinds]

    def row(title: str, rows: Sequence[Entry]) -> list[Any]:
        if rows[0].is_wrong:
            ours = Counter(e.ours for e in rows)
            theirs = [n for s in SYSTEMS for n in counts(rows, s, WRONG)]
            return [title, len(rows), *(ours[k] for k in OURS), *theirs]
        return [title, len(rows), *(n for s in SYSTEMS for n in counts(rows, s, CORRECT))]

    def table(head: Sequence[str], rows: Sequence[Entry]) -> str:
        groups: dict[str, list[Entry]] = {}
        for e in rows:
            groups.setdefault(e.group, []).append(e)
        body = [row(group, members) for group, members in groups.items()]
        return markdown(head, [*body, [f"**{x}**" for x in row("all", rows)]])

    kinds = {k: [e for e in wrong if e.ours == k] for k in OURS}
    by_fshard = [[*cells[:2], *cells[2 + len(OURS) :]] for k, rows in kinds.items() if rows for cells in [row(k, rows)]]
    theirs = [f"{s}: {k}" for s in SYSTEMS for k in WRONG]
    return {
        "by fshard": markdown(["caught by fshard's", "programs", *theirs], by_fshard),
        "wrong": table(["mistake", "programs", *(f"fshard: {k}" for k in OURS), *theirs], wrong),
        "correct": table(["programs of", "programs", *(f"{s}: {k}" for s in SYSTEMS for k in CORRECT)], correct),
        "caught by others": _names(wrong, verdicts, lambda e, v: v == "caught" and e.ours != "types"),
        "false alarms": _names(correct, verdicts, lambda e, v: v == "false alarm"),
    }  # fmt: skip


def _names(rows: Sequence[Entry], verdicts: dict[str, dict[str, str]], wanted: Any) -> str:
    """Return a list of names for each system."""
    lines = []
    for system in SYSTEMS:
        names = [e.name for e in rows if wanted(e, verdicts[system][e.name])]
        lines.append(f"- {system}, {len(names)}: {', '.join(f'`{n}`' for n in names) or 'none'}")
    return "\n".join(lines)


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown, zeros left blank but in the last row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join("" if x == 0 else str(x) for x in line) + " |" for line in lines)


def filled(page: str) -> str:
    """Return the page with each table between its markers `<!-- table: NAME -->` and `<!-- end -->`."""
    for name, text in tables().items():
        before, marker, rest = page.partition(f"<!-- table: {name} -->\n")
        assert marker, f"the page has no marker for {name}"
        _, end, after = rest.partition("<!-- end -->")
        page = f"{before}{marker}{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

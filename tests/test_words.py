"""Habits of the English in code, docs and notebooks that a reader parses twice: their counts may only fall.

`python -m tests.test_words` prints the counts of today, and `python -m tests.test_words FILE ...` the lines of files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# habit -> what to write instead, as a regular expression of the habit and its counts in (code, docs, notebooks)
HABITS: dict[str, tuple[str, tuple[int, int, int]]] = {
    # repeat the noun, use 's, or split the sentence
    "of which": (r"\bof (?:which|whose|whom)\b", (2, 0, 0)),
    "those of": (r"\bthose of\b", (10, 0, 0)),
    "that of": (r"\bthat of\b", (3, 0, 0)),
    # is not an X, does not have the X
    "is no X": (r"(?<!there )\b(?:is|are|was|were) no\b(?! longer)|\bha(?:s|ve|d) not the\b", (8, 0, 0)),
    # full, unsharded, complete; only, before its word; (drop), separate; compared with, next to
    "whole": (r'(?<!["\'])\bwhole\b', (29, 0, 0)),
    "alone": (r"\balone\b", (8, 0, 0)),
    "own": (r"\bown\b", (116, 7, 0)),
    "beside": (r"\bbeside\b", (1, 0, 0)),
    # the name of the number; unchanged, in the same way
    "so many": (r"\bso many\b", (2, 0, 0)),
    "as they are": (r"\bas (?:it is|they are)\b", (5, 0, 1)),
    # is, appears, is stored; prints, reports, passes
    "stands, lies": (r"\b(?:stands?|stood|lies|lay)\b", (3, 0, 0)),
    "tells, says": (r"\b(?:tells?|told|says?|said)\b", (92, 4, 3)),
    # file_tensor, like=, from_x, unchanged, _same_name_error, _exchange_marker, _split_evenly, _broadcast, _partly_read
    "theirs": (r"\b_?theirs\b", (117, 2, 0)),
    "of=": (r"\bof(?:=|: )", (117, 10, 0)),
    "X.of": (r"\bdef of\(", (10, 0, 0)),
    "names": (r"\b(?:as_they_are|_namesake|_meet|_nths|_beside|_rests)\b", (0, 0, 0)),
}
PLACES = ("code", "docs", "notebooks")


@cache
def texts(place: str) -> dict[str, str]:
    """Return the text of each file of a place: code with its strings and comments, prose without blocks of code."""
    patterns = {"code": ["fshard/**/*.py"], "notebooks": ["notebooks/*.ipynb"],
                "docs": ["*.md", "docs/*.md", "tests/benchmarks/README.md"]}  # fmt: skip
    files = sorted(file for pattern in patterns[place] for file in ROOT.glob(pattern))
    return {str(file.relative_to(ROOT)): prose(file) for file in files}


def prose(file: Path) -> str:
    text = file.read_text()
    if file.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        return "\n".join("".join(source) for source in cells)
    if file.suffix == ".md":
        return re.sub(r"(?ms)^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text)
    return text


def found(text: str) -> dict[str, int]:
    text = text.lower()  # much faster than re.IGNORECASE
    return {habit: len(re.findall(pattern, text)) for habit, (pattern, _) in HABITS.items()}


def lines(text: str) -> Iterator[str]:
    """Iterate over the lines that have a habit."""
    for number, line in enumerate(text.splitlines(), 1):
        if habits := [habit for habit, n in found(line).items() if n]:
            yield f"{number}: {', '.join(habits)}: {line.strip()}"


@pytest.mark.parametrize("place", PLACES)
def test_habits_of_words_only_become_fewer(place: str) -> None:
    counts = found("\n".join(texts(place).values()))
    most = {habit: numbers[PLACES.index(place)] for habit, (_, numbers) in HABITS.items()}
    more = {habit: f"{n} > {most[habit]}" for habit, n in counts.items() if n > most[habit]}
    assert not more, f"{more}: rewrite the sentence; python -m tests.test_words FILE shows the lines"


def test_habits_are_found_in_prose_and_not_in_blocks_of_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('the whole leaf\n```python\nwhole = own\n```\nthere is no path; a key is no path, out="whole"\n')
    assert {habit: n for habit, n in found(prose(page)).items() if n} == {"whole": 1, "is no X": 1}
    assert [line.split(":")[0] for line in lines(prose(page))] == ["1", "5"]


if __name__ == "__main__":
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(*(f"{name}:{line}" for line in lines(prose(Path(name)))), sep="\n")
    else:
        for habit in HABITS:
            print(f"{habit:<14}", tuple(found("\n".join(texts(place).values()))[habit] for place in PLACES))

"""Verdicts of another system on every program, and the file that keeps them."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.corpus.neighbours.adapter import Call, Missing
from tests.corpus.neighbours.programs import Entry, copied, entries

HERE = Path(__file__).parent
SECONDS = 120  # for one program


class Refused(Exception):
    """An error of the other system's types, as its text."""


class Accepted(Exception):
    """The other system accepts a program that could not be run for its numbers."""


def verdict_of(entry: Entry, run: Callable[[Call], Sequence[Any]], show=False) -> tuple[str, str]:
    """Return (verdict, detail) of a program that `run` runs under another system.

    caught, false alarm: refused by the system's types. silent: accepted, with another answer than that of one device.
    right, passes: accepted, with that answer. n/a: not to be run under this system, with the reason.
    """
    try:
        call = Call.of(entry.f, copied(entry.args), entry.expected())
        results = run(call)
    except Refused as e:
        if show: traceback.print_exc()
        return ("caught" if entry.is_wrong else "false alarm"), _first_line(e)
    except Accepted as e:
        return ("silent" if entry.is_wrong else "passes"), _first_line(e)
    except Missing as e:
        if show: traceback.print_exc()
        return "n/a", _first_line(e)
    differing = [i for i, (x, y) in enumerate(zip(results, call.expected, strict=True)) if not same(x, y)]
    if not differing:
        return ("right" if entry.is_wrong else "passes"), ""
    if not entry.is_wrong:
        return "n/a", f"accepted, but results {differing} differ from those of one device"
    return "silent", ""


def same(x: Any, y: Any) -> bool:
    """Return whether two results are equal to rounding."""
    if not isinstance(y, torch.Tensor):
        return bool(x == y)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    return x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-5, equal_nan=True)


def _first_line(e: Exception) -> str:
    return " ".join(str(e).split())[:200]


def write(system: str, versions: Mapping[str, str], run: Callable[[Call], Sequence[Any]]) -> None:
    """Write the verdicts on all programs, or print those whose names contain an argument of the command line."""
    wanted = sys.argv[1:]
    verdicts = {}
    for entry in entries():
        if wanted and not any(w in entry.name for w in wanted):
            continue
        signal.signal(signal.SIGALRM, _too_slow)
        signal.alarm(SECONDS)
        try:
            verdicts[entry.name] = verdict_of(entry, run, wanted)
        except Exception as e:
            if wanted:
                traceback.print_exc()
            verdicts[entry.name] = "n/a", f"not adapted: {type(e).__name__}: {_first_line(e)}"
        finally:
            signal.alarm(0)
        print(entry.name, *verdicts[entry.name], sep=" | ", flush=True)
    if not wanted:
        text = json.dumps({"versions": versions, "verdicts": verdicts}, indent=1)
        (HERE / f"{system}.json").write_text(text + "\n")


def _too_slow(*_: Any) -> None:
    raise Missing(f"not done in {SECONDS} s")

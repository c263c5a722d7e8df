"""Verdicts of another system on every program, and the file that keeps them."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.corpus.neighbours.adapter import Call, MissingError
from tests.corpus.neighbours.programs import Entry, copied, entries

HERE = Path(__file__).parent
SECONDS = 120  # for one program


class RefusedError(Exception):
    """An error of the other system's types, as its text."""


def verdict_of(entry: Entry, run: Callable[[Call], Sequence[Any] | None], show: bool = False) -> tuple[str, str]:
    """Return (verdict, detail) of a program that `run` runs under another system; it returns None for no numbers.

    caught, false alarm: refused by the system's types. silent: accepted, with another answer than that of one device.
    right, passes: accepted, with that answer. n/a: not to be run under this system, with the reason.
    """
    try:
        call = Call.of(entry.f, copied(entry.args), entry.expected())
        results = run(call)
    except RefusedError as e:
        if show:
            traceback.print_exc()
        return ("caught" if entry.is_wrong else "false alarm"), _first_line(e)[:72]
    except MissingError as e:
        if show:
            traceback.print_exc()
        return "n/a", _first_line(e)
    if results is None:
        return (
            "silent" if entry.is_wrong else "passes"
        ), "by its types alone: LocalTensorMode has no number of one rank"
    half = "precision" in entry.group
    differing = [i for i, (x, y) in enumerate(zip(results, call.expected, strict=True)) if not same(x, y, half)]
    if not differing:
        return ("right" if entry.is_wrong else "passes"), ""
    if not entry.is_wrong:
        return "n/a", f"accepted, but results {differing} differ from those of one device"
    return "silent", ""


def same(x: Any, y: Any, half: bool) -> bool:
    """Return whether two results are equal to rounding, in bfloat16 if `half`."""
    if not isinstance(y, torch.Tensor):
        return bool(x == y)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if x.shape != y.shape:
        return False
    x, y = (t.to(torch.complex128 if y.is_complex() else torch.float64) for t in (x, y))
    finite = y[y.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    rtol, atol = (3e-2, 3e-2 * largest) if half else (1e-3, 1e-5 * min(largest, 1.0))
    return torch.allclose(x, y, rtol=rtol, atol=max(atol, 1e-9), equal_nan=True)


def _first_line(e: Exception) -> str:
    return " ".join(str(e).split())[:120]


def write(system: str, packages: Sequence[str], run: Callable[[Call], Sequence[Any] | None]) -> None:
    """Write the verdicts on all programs that the file lacks; with arguments, print those on programs named so."""
    versions = {p: importlib.metadata.version(p).partition("+")[0] for p in packages}
    wanted, path = sys.argv[1:], HERE / f"{system}.json"
    verdicts = json.loads(path.read_text())["verdicts"] if path.exists() and not wanted else {}
    programs = [e for e in entries() if e.name not in verdicts and (not wanted or any(w in e.name for w in wanted))]
    for entry in programs:
        signal.signal(signal.SIGALRM, _too_slow)
        signal.alarm(SECONDS)
        try:
            verdicts[entry.name] = verdict_of(entry, run, show=bool(wanted))
        except Exception as e:
            if wanted:
                traceback.print_exc()
            verdicts[entry.name] = "n/a", f"not adapted: {type(e).__name__}: {_first_line(e)}"
        finally:
            signal.alarm(0)
        print(entry.name, *verdicts[entry.name], sep=" | ", flush=True)
        if not wanted:
            lines = [f"{json.dumps(name)}: {json.dumps(verdict)}" for name, verdict in sorted(verdicts.items())]
            text = f'{{"versions": {json.dumps(versions)},\n"verdicts": {{\n' + ",\n".join(lines) + "\n}}\n"
            path.write_text(text)


def _too_slow(*_: Any) -> None:
    raise MissingError(f"not done in {SECONDS} s")

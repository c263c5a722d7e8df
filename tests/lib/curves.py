"""The curve of a run of a recipe: what it logged at each step, and that another run has the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Curve = list[dict[str, Any]]


def metrics(folder: Path) -> Curve:
    """Return the metrics of each step that a run wrote in its folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_curve(got: Curve, want: Curve, *, rtol: float) -> None:
    """Assert that two runs have the same steps and learning rates, and losses and gradient norms within `rtol`."""
    assert [(m["step"], m["lr"]) for m in got] == [(m["step"], m["lr"]) for m in want]
    for a, b in zip(got, want, strict=True):
        for name in ("loss", "grad_norm"):
            assert abs(a[name] - b[name]) <= rtol * abs(b[name]), (a["step"], name, a[name], b[name])

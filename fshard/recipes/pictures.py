"""Pictures of a run: the classes that it confuses."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def most_confused(targets: Array, predictions: Array, most: int = 24) -> tuple[Array, Array]:
    """Return the classes of the most frequent mistakes, [n], and how often each one was taken for each other, [n, n].

    Row i, column j: images of class i that were taken for class j; the diagonal has those that are right.
    """
    wrong = targets != predictions
    pairs, counts = np.unique(np.sort(np.stack([targets, predictions], 1)[wrong], 1), axis=0, return_counts=True)
    chosen: list[int] = []
    for pair in pairs[np.argsort(-counts, kind="stable")].tolist():
        new = [c for c in pair if c not in chosen]
        if len(chosen) + len(new) > most:
            break
        chosen += new
    table = [[int(((targets == i) & (predictions == j)).sum()) for j in chosen] for i in chosen]
    return np.array(chosen, np.int64), np.array(table, np.int64).reshape(len(chosen), len(chosen))


def confusion(path: Path, targets: Array, predictions: Array, names: Sequence[str]) -> None:
    """Draw the counts of `most_confused`."""
    classes, counts = most_confused(targets, predictions)
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="taken for", ylabel="class", title="The classes most often confused")
    if len(classes):
        axes.imshow(counts, cmap="Blues", vmax=2 * counts.max())  # pale, so that numbers can be read
        for i, j in zip(*counts.nonzero(), strict=True):
            axes.text(j, i, counts[i, j], ha="center", va="center")
        labels = [_drawable(names[c]) if c < len(names) else f"empty {c}" for c in classes]
        turned = 90 if max(map(len, labels)) > 2 else 0
        axes.set_xticks(range(len(classes)), labels, rotation=turned, parse_math=False)
        axes.set_yticks(range(len(classes)), labels, parse_math=False)
    figure.savefig(path)


def _drawable(name: str) -> str:
    """Return the name, or its escapes: DejaVu, the font of the picture, has no East Asian characters."""
    return name if all(ord(c) < 0x2E80 for c in name) else ascii(name)[1:-1]

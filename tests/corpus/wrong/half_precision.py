"""Mistakes in bfloat16 and integer formats, where a tolerance for rounding must not hide them.

Legend: B batch, D width, F hidden width; [F@model] is a dim split over an axis.
"""

from __future__ import annotations

from torch import Tensor

import fshard as fs
from fshard import P
from tests.corpus.wrong.program import WrongProgram, normal


def quantized_by_range_of_rows(w: Tensor) -> Tensor:  # w [D, F@model]: a scale for each row
    scale = fs.pvary(fs.pmax(w.abs().amax(1, keepdim=True), "model"), "model") / 7
    # WRONG: scale = w.abs().amax(1, keepdim=True) / 7
    return (w / scale).round() * scale


MODEL2 = {"model": 2}
MLP = {"up": normal("up", 4, 6), "down": normal("down", 6, 4)}

PROGRAMS = [
    WrongProgram(
        "quantized_by_local_range", quantized_by_range_of_rows, MODEL2, (P(None, "model"),), P(None, "model"),
        (MLP["up"],), "verify", "model",
    ),
]  # fmt: skip

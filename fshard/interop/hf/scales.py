"""Matrices that a file has in 8 bits and with scales, read as their products: FP8 and int8, by blocks or rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard._core.files.io import open_file
from fshard._core.files.safetensors import HeaderEntry

from .folder import CONFIG, WeightHeaders, read_json

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The end of the name of the scales -> the dtypes of the matrix, and a factor: bitsandbytes' are the largest of 127.
_SCALES = {".weight_scale_inv": (_FP8, 1.0), ".weight_scale": ((*_FP8, torch.int8), 1.0),
           ".SCB": ((torch.int8,), 7.874015718698502e-3)}  # fmt: skip

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of scales


@dataclass(frozen=True, kw_only=True)
class ScaledEntry(HeaderEntry):
    """A matrix of dtype `stored` in a file: each block is multiplied by one of `scales`, and by `factor`."""

    stored: torch.dtype
    scales: HeaderEntry
    block: tuple[int, int]
    factor: float

    def multiplied(self, values: Tensor, scales: Tensor, offsets: Sequence[int], run: int) -> Tensor:
        """Return the values of the runs of `run` elements at `offsets`."""
        index = (torch.tensor(offsets).unsqueeze(1) + torch.arange(run)).flatten()
        row, column = index // self.shape[1] // self.block[0], index % self.shape[1] // self.block[1]
        blocks = -(-self.shape[1] // self.block[1])
        return (values.float() * (scales.float() * self.factor)[row * blocks + column]).to(self.dtype)


def join_scales(headers: WeightHeaders) -> None:
    """Make each matrix with its scales one tensor of the scales' dtype. What has no known formula is left unchanged."""
    if not any(name.endswith(tuple(_SCALES)) for name in headers.tensors):
        return
    config = headers.path / CONFIG
    quantization = read_json(config).get("quantization_config") if config.is_file() else None
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    block = (size[0], size[1]) if isinstance(size, list) and len(size) == 2 else (128, 128)
    for name, scales in list(headers.tensors.items()):
        end = next((end for end in _SCALES if name.endswith(end)), "")
        stem = name.removesuffix(end)
        matrix, format_of = headers.tensors.get(f"{stem}.weight"), headers.tensors.get(f"{stem}.weight_format")
        if not end or matrix is None or f"{stem}.weight_zero_point" in headers.tensors:
            continue
        of_scale = _block_of(end, matrix, scales, block)
        if of_scale is None or matrix.dtype is None or (format_of is not None and _first_byte(format_of)):
            continue
        fields = {f.name: getattr(matrix, f.name) for f in dataclasses.fields(HeaderEntry)} | {"dtype": scales.dtype}
        headers.tensors[f"{stem}.weight"] = ScaledEntry(**fields, stored=matrix.dtype, scales=scales, block=of_scale,
                                                        factor=_SCALES[end][1])  # fmt: skip
        for used in (name, f"{stem}.weight_format"):
            headers.tensors.pop(used, None)


def _block_of(end: str, matrix: HeaderEntry, scales: HeaderEntry, block: tuple[int, int]) -> tuple[int, int] | None:
    """Return the numbers of rows and columns that share a scale; None if no formula is known."""
    if (
        len(matrix.shape) != 2
        or matrix.strides
        or scales.strides
        or matrix.dtype not in _SCALES[end][0]
        or scales.dtype not in _DTYPES
    ):
        return None
    rows, columns = matrix.shape
    if end == ".weight_scale_inv":
        return block if scales.shape == (-(-rows // block[0]), -(-columns // block[1])) else None
    if math.prod(scales.shape) == 1:
        return rows, columns
    return (1, columns) if scales.shape in ((rows,), (rows, 1)) else None


def _first_byte(entry: HeaderEntry) -> int:
    with open_file(entry.file) as f:
        f.seek(entry.start)
        return f.read(1)[0]

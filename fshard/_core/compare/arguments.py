"""Comparison of the arguments of one call between processes, which must pass the same global values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard._core.protocol import Comm
from fshard._core.torch import is_wrapped
from fshard.errors import ShardingError, fail, join_limited
from fshard.mesh import Mesh
from fshard.sharded import Sharded
from fshard.spec import describe

from .digest import digest_and_value, format_digest

_FIX_TENSOR = (
    "draw it by fs.random and a key, or after torch.manual_seed(0) on every rank; place the rows that\n"
    "       each rank loads for itself with fs.from_callback or fs.data.load"
)
_FIX_NUMBER = "pass one value on every rank; inside the function, fs.axis_index(axis) tells the ranks apart"
_FIX_PLACED = "place it alike on every rank"
_FIX_ABSENT = "pass the same tree of arguments on every rank"


class _Argument(NamedTuple):
    """One rank's argument: its type and value as an error shows them, and what is equal for equal values."""

    text: str
    value: Any
    fix: str


_ABSENT = _Argument("nothing", None, _FIX_ABSENT)


def check_same_arguments(name: str, mesh: Mesh, labels: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise for arguments that are not the same on every rank of a process mesh: the same error on each.

    Compares the bits of plain tensors and arrays, numbers, bools and strings, and the placement of placed leaves. Any
    other object, such as a logger, may differ. Every rank must call it. Costs an exchange over each axis, one of some
    bytes for each leaf, and one read of the plain tensors, of 1 GB in about 0.7 s on one core.
    """
    if mesh.kind != "process" or mesh.size == 1:
        return
    mesh.run(lambda comm, _: _exchange_marker(comm, mesh.device))
    mine = {label: row for label, x in zip(labels, leaves, strict=True) if (row := _argument(x)) is not None}
    names, everyone = zip(*mesh.gather_objects((name, mine)), strict=True)
    if len(set(names)) > 1:
        raise fail("the ranks call different functions", *(f"rank {rank}  {n}" for rank, n in enumerate(names)),
                   fix="every rank must call the same functions in the same order")  # fmt: skip
    labels = list(dict.fromkeys(label for rows in everyone for label in rows))
    columns = {label: [rows.get(label, _ABSENT) for rows in everyone] for label in labels}
    wrong = [label for label, column in columns.items() if any(row != column[0] for row in column)]
    if wrong:
        raise _difference(name, wrong[0], columns[wrong[0]], wrong[1:])


def _difference(name: str, label: str, column: list[_Argument], others: list[str]) -> ShardingError:
    """Return the error of an argument with these values by rank; `others` differ too."""
    ranks: dict[_Argument, list[str]] = {}
    for rank, row in enumerate(column):
        ranks.setdefault(row, []).append(str(rank))
    second = list(ranks.values())[1][0]
    shown = [(f"rank {join_limited(of, 8, ',')}", row.text) for row, of in list(ranks.items())[:6]]
    width = max(len(left) for left, _ in shown)
    notes = [f"{left:{width}}  {text}" for left, text in shown]
    if len(ranks) > len(shown):
        notes.append(f"and {len(ranks) - len(shown)} more values")
    if others:
        notes.append(f"so {'does' if len(others) == 1 else 'do'} {join_limited(others, 4)}")
    fix = _FIX_ABSENT if _ABSENT in ranks else column[0].fix
    if fix != _FIX_PLACED:
        notes.append("a value that is not placed is global: every process must pass the same one")
    return fail(f"{name}: {label} differs between rank 0 and rank {second}", *notes, fix=fix)


def _exchange_marker(comm: Comm, device: torch.device) -> None:
    """Exchange a constant, so that a rank in another call fails now, not at the timeout.

    On CPUs over each axis: one exchange between all ranks would wait for that rank until the timeout. Elsewhere
    between all ranks, since each set of axes needs a process group.
    """
    axes = tuple(axis for axis, n in comm.sizes.items() if n > 1)
    for over in [(axis,) for axis in axes] if device.type == "cpu" else [axes]:
        comm.agree("the start of a checked call", over, device)


def _argument(x: Any) -> _Argument | None:
    if isinstance(x, Sharded):
        text = describe(x, x.spec)
        return _Argument(text, text, _FIX_PLACED)
    if isinstance(x, Tensor):
        text = describe(x)
        if x.is_meta or x.layout != torch.strided or is_wrapped(x):  # refused later, on every rank
            return _Argument(text, text, _FIX_TENSOR)
        first, second, value = digest_and_value(x.detach().cpu()).tolist()  # digests of two kinds of device differ
        shown = format_digest((first >> 32, second, value), x)
        return _Argument(f"{text}  {shown}", (text, first, second), _FIX_TENSOR)
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.hasobject is False:
        raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)  # no copy of an array that may be a file
        digest = hashlib.blake2b(raw.data, digest_size=16).hexdigest()
        text = f"{x.dtype}{list(x.shape)}"
        return _Argument(f"{text}  digest {digest[:8]}", (text, digest), _FIX_TENSOR)
    if isinstance(x, (bool, int, float, complex, str)):
        text = repr(x)
        return _Argument(text if len(text) < 80 else f"{text[:77]}...", (type(x).__name__, text), _FIX_NUMBER)
    return None

"""The blocking transfers of `pairs` as operations of torch, which a compiler takes into its graph as they are.

A line is told by the name of its group, the places of its ranks there, and the position of this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import pairs
from .mail import Line, Wires

_wires: weakref.WeakValueDictionary[str, Wires] = weakref.WeakValueDictionary()  # by the name of a group

_library: Any = torch.library.Library("fshard", "FRAGMENT")  # type: ignore[no-untyped-call]


def know(name: str, wires: Wires) -> None:
    """Let the operations find the connections of a group."""
    _wires[name] = wires


def _define(name: str, verb: Callable[..., Tensor], fake: Callable[..., Tensor], rest: str = "") -> None:
    def run(x: Tensor, *given: Any) -> Tensor:
        *own, group, places, me = given
        return verb(Line(_wires[group], places, me), x, *own)

    _library.define(f"{name}(Tensor x, {rest}str group, int[] places, int me) -> Tensor")
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"fshard::{name}", fake, lib=_library)


def _alike(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _stacked(x: Tensor, group: str, places: Sequence[int], me: int) -> Tensor:
    return x.new_empty((len(places), *x.shape))


def _row(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[1:])


def _permute(line: Line, x: Tensor, sources: Sequence[int], targets: Sequence[int]) -> Tensor:
    return pairs.permute(line, x, list(zip(sources, targets, strict=True)))


_define("all_reduce", pairs.all_reduce, _alike, "str op, ")
_define("all_gather", pairs.all_gather, _stacked)
_define("reduce_scatter", pairs.reduce_scatter, _row)
_define("all_to_all", pairs.all_to_all, _alike)
_define("permute", _permute, _alike, "int[] sources, int[] targets, ")

ops = torch.ops.fshard

__all__ = ["know", "ops"]

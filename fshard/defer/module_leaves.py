"""The leaves of a module, and the entries of its dicts of parameters and buffers in which they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fshard import tree

from .references import Slot

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # of all modules: parameters, buffers, modules, hooks

Named = Mapping[str, Tensor]
Leaves = dict[str, dict[str, Tensor]]  # by kind ("params", "buffers") and name


@dataclass(frozen=True)
class Place(Slot):
    """One entry of a module's parameters or buffers: its dotted names, and the name of the leaf it uses.

    A module that its parents have more than once (`Sequential(a, relu, a)`) gives each of its entries more names.
    """

    names: tuple[str, ...]
    leaf: str
    kind: str  # "params" or "buffers"
    transient: bool

    @property
    def name(self) -> str:
        return self.names[0]


def places_of(module: nn.Module, ties: Mapping[str, str] | None = None) -> list[Place]:
    """Return the places of parameters and buffers, once each. Places of one tensor use one leaf, by the first name."""
    ties = ties or {}
    first: dict[int, str] = {}
    places: dict[tuple[int, str], Place] = {}
    for prefix, m in named_modules(module):
        for kind, holder in (("params", m._parameters), ("buffers", m._buffers)):
            for key, x in holder.items():
                if x is None:
                    continue
                name = f"{prefix}{key}"
                first_name = first.setdefault(id(x), name)
                leaf = ties.get(name, ties.get(first_name, first_name))
                place = Place(holder, key, (name,), leaf, kind, key in m._non_persistent_buffers_set)
                if known := places.get((id(holder), key)):
                    place = replace(known, names=(*known.names, name), leaf=leaf if name in ties else known.leaf)
                places[id(holder), key] = place
    return list(places.values())


def named_modules(
    module: nn.Module, prefix: str = "", parents: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their prefixes, a shared one under each; one that contains itself has no further names."""
    yield prefix, module
    for key, m in module._modules.items():
        if m is not None and m is not module and m not in parents:
            yield from named_modules(m, f"{prefix}{key}.", (*parents, module))


def memory_orders(leaves: Leaves) -> dict[str, list[int]]:
    """Return the dims, outermost in memory first, of the leaves that are not row-major but have no gaps."""
    dense = {name: x for named in leaves.values() for name, x in named.items() if x.layout is torch.strided}
    orders = {name: np.argsort(x.stride(), kind="stable")[::-1].tolist() for name, x in dense.items()
              if not x.is_contiguous()}  # fmt: skip
    return {name: order for name, order in orders.items() if dense[name].permute(order).is_contiguous()}


def in_memory_order(named: Mapping[str, Any], orders: Mapping[str, list[int]]) -> Mapping[str, Any]:
    """Return the leaves with the memory order that the constructor gave them: torch's kernels round by it."""
    if not orders:
        return named
    out = dict(named)
    for name in orders.keys() & named.keys():
        x, order = named[name], orders[name]
        if type(x) is Tensor or type(x) is nn.Parameter:
            inverse = [order.index(d) for d in range(len(order))]
            out[name] = x if x.permute(order).is_contiguous() else x.permute(order).contiguous().permute(inverse)
    return out


def leaves_at(places: Sequence[Place]) -> Leaves:
    leaves: Leaves = {"params": {}, "buffers": {}}
    for p in places:
        leaves[p.kind].setdefault(p.leaf, p.value)
    return leaves


def tensors_of(params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of the leaves, by names that are unique for each tensor of a Weight."""
    return {tree.show(name, path): x for name, leaf in params.items() for path, x in tree.leaves_with_path(leaf)}

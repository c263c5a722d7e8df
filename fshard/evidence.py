"""What shows that one leaf is initialized: that it has values, what of them is not finite, what its replicas hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import parameter

from . import tree
from ._compare import fingerprint, join_limited, span, told, unequal
from ._ops import differentiable_dtype
from ._torch_compat import FakeTensor
from .errors import ShardingError, fail
from .init import Deferred
from .mesh import Mesh
from .sharded import Sharded
from .spec import Box, P, box_bounds, box_shape, describe, format_axes, full_box

SCALARS = (bool, int, float, str)
CHUNK = 1 << 20  # elements looked at at a time
Odd = dict[str, tuple[int, tuple[int, ...]]]  # "NaN" or "infinite" -> how many, and the global index of the first


@dataclass(frozen=True)
class Held:
    """What one rank holds of a leaf: what is not finite in it, and a fingerprint if others should hold the same."""

    odd: Odd
    print: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Leaf:
    """A leaf to be looked at, under its first path."""

    path: tree.Path
    x: Any
    mesh: Mesh | None  # of what has none, that of the processes
    made: str  # how it is described, if that is known
    may_be_infinite: bool

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.x, (Sharded, Tensor))

    @property
    def name(self) -> str:
        return tree.dotted(self.path)

    @property
    def where(self) -> str:
        return f"validate: {tree.show('tree', self.path)}"

    @property
    def spec(self) -> P:
        return self.x.spec if isinstance(self.x, Sharded) else P()

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.mesh.size) if self.mesh else (0,)

    @property
    def over(self) -> tuple[str, ...]:
        """The axes over which it is one value."""
        sizes = self.mesh.axes if self.mesh and self.is_tensor else {}
        return tuple(a for a, n in sizes.items() if n > 1 and a not in self.spec.axes)

    def box(self, rank: int) -> Box:
        return self.x.box(rank) if isinstance(self.x, Sharded) else full_box(self.x.shape)

    def __repr__(self) -> str:
        """What must be alike on every process: of a number, its value."""
        x = self.x
        if isinstance(x, (Sharded, Tensor)) and not shapeless(x):
            on = format_axes(self.mesh.axes) if self.mesh else ""
            return f"{describe(x.dtype, x.shape, self.spec)} on {on}" if on else describe(x.dtype, x.shape)
        return repr(x) if isinstance(x, (Deferred, *SCALARS)) else f"a {type(x).__name__}"

    def fail(self, what: str, *notes: str, fix: str) -> ShardingError:
        facts: dict[str, object] = {"leaf": describe(self.x.dtype, self.x.shape, self.spec)}
        if self.made:
            facts["described as"] = self.made
        if self.mesh:
            facts["mesh"] = format_axes(self.mesh.axes)
        return fail(f"{self.where} {what}", *notes, fix=fix, **facts)

    def problem(self) -> ShardingError | None:
        """Why it has no values in this process, if it has none."""
        x = self.x
        if isinstance(x, SCALARS):
            return None
        if isinstance(x, Deferred):
            return fail(f"{self.where} is only described", fix="fs.materialize(tree, specs, mesh, key=key)", leaf=x)
        if not isinstance(x, (Sharded, Tensor)):
            return fail(f"{self.where} is a {type(x).__name__}, not a leaf", fix="a Sharded, a tensor or a number")
        if shapeless(x):
            return fail(f"{self.where} is a lazy parameter: it has no shape yet", fix="give its module all its sizes")
        if isinstance(x, Tensor) and x.layout != torch.strided:
            return fail(f"{self.where} is {x.layout}, which has other elements than a leaf", fix="x.to_dense()")
        try:
            shards = x.shards if isinstance(x, Sharded) else (x,)
        except ShardingError as e:  # it was donated
            return ShardingError(f"{self.where}: {e}")
        made = "fs.materialize its description"
        if isinstance(x, Sharded) and x.mesh.kind == "abstract":
            return self.fail("is on an abstract mesh, where leaves have no values", fix=f"{made} on a mesh with ranks")
        for s in shards:
            if s.is_meta or isinstance(s, FakeTensor):
                return self.fail("is on the meta device: it has a shape and no values", fix=made)
            if s.numel() and not s.untyped_storage().nbytes():
                return self.fail("has lost its storage: something has freed it", fix=f"{made}, or keep what was freed")
        for rank, s in zip(x.mesh.ranks, shards, strict=True) if isinstance(x, Sharded) else ():
            got, part = describe(s.dtype, s.shape), describe(x.dtype, box_shape(self.box(rank)))
            if got != part:
                return self.fail("is not laid out by its spec", f"rank {rank} holds {got}, and its part is {part}",
                                 fix="make it with fs.materialize, fs.device_put or fs.from_callback")  # fmt: skip
        return None

    def look(self) -> list[tuple[int, Held]]:
        """What each rank of this process holds."""
        x, ranks = self.x, self.mesh.ranks if self.mesh else (0,)
        if isinstance(x, SCALARS):
            odd = "NaN" if x != x else "infinite" if x in (math.inf, -math.inf) else ""
            return [(rank, Held({odd: (1, ())} if odd else {}, ())) for rank in ranks]
        shards = x.shards if isinstance(x, Sharded) else [x] * len(ranks)
        return [
            (rank, Held(_odd(s.detach(), self.box(rank)), tuple(fingerprint(s).tolist()) if self.over else ()))
            for rank, s in zip(ranks, shards, strict=True)
        ]

    def unwritten(self, held: Mapping[int, Held]) -> ShardingError | None:
        """The error of elements that are not finite."""
        kinds = ["NaN"] if self.may_be_infinite else ["NaN", "infinite"]
        bad = {k: found for k in kinds if (found := {r: h.odd[k] for r, h in held.items() if k in h.odd})}
        glob = ".".join("*" if part.isdecimal() else part for part in self.name.split(".")) or "**"
        fixes = {"NaN": "write every element in the constructor, or mend the file it was read from",
                 "infinite": f"mend what made it; or, if infinities are meant here: allow_inf={glob!r}"}  # fmt: skip
        fix = "\n       ".join(fixes[k] for k in bad)
        if not bad or not self.is_tensor:
            return fail(f"{self.where} is {self.x}", fix="give it a finite value") if bad else None
        notes, total = [], 0
        for kind, by_rank in bad.items():
            boxes: dict[Any, int] = {}  # a replica's elements are those of another
            for r, (n, _) in by_rank.items():
                boxes[box_bounds(self.box(r))] = max(n, boxes.get(box_bounds(self.box(r)), 0))
            n, first = sum(boxes.values()), min(by_rank, key=lambda r: (by_rank[r][1], r))
            total += n
            on = f", on rank {join_limited([str(r) for r in sorted(by_rank)], 8)}" if self.mesh else ""
            also = ": what memory holds that nothing has written" if kind == "NaN" else ""
            notes.append(f"{n} {kind}, the first at {list(by_rank[first][1])}{on}{also}")
        return self.fail(f"is not finite in {total} of {self.x.numel()} elements", *notes, fix=fix)

    def unequal(self, held: Mapping[int, Held]) -> ShardingError | None:
        """The error of replicas that differ."""
        if not self.over or self.mesh is None:
            return None
        live = [a for a, n in self.mesh.axes.items() if n > 1]
        sizes = [self.mesh.axes[a] for a in live]
        found = unequal(torch.tensor([held[r].print for r in self.ranks]).view(*sizes, 1, 3), live, [self.spec])
        if not found:
            return None
        axes = " and ".join(repr(f.axis) for f in found)
        one = self.x.shards[0] if isinstance(self.x, Sharded) else self.x
        return self.fail(f"is not one value: ranks of {axes} hold different ones", *[told(f, one) for f in found],
                         fix="make it from one key or file on every rank, or name the axis in its spec")  # fmt: skip


def shapeless(x: object) -> bool:
    """Whether it is a lazy parameter, which has no shape yet."""
    return isinstance(x, Tensor) and parameter.is_lazy(x)


def _odd(x: Tensor, box: Box) -> Odd:
    """What is not finite in one shard: how many NaN and how many infinities, and the global index of the first."""
    found: Odd = {}
    for start in range(0, x.numel(), CHUNK) if differentiable_dtype(x) else ():
        part = span(x, start, min(start + CHUNK, x.numel()))
        part = part.to(torch.float32) if part.itemsize == 1 else part  # float8 knows no isfinite
        if bool(part.isfinite().all()):
            continue
        nan = part.isnan()
        for kind, at in (("NaN", nan), ("infinite", part.isinf() & ~nan)):  # a complex number may be both
            n = int(at.count_nonzero())
            if n:
                local = np.unravel_index(start + int(at.to(torch.uint8).argmax()), x.shape)
                first = tuple(int(i) + s.start for i, s in zip(local, box, strict=True))
                before, first = found.get(kind, (0, first))
                found[kind] = (before + n, first)
    return found


__all__ = ["SCALARS", "Held", "Leaf", "shapeless"]

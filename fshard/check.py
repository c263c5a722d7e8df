"""The types of a program, checked without data, on a mesh of any size: `check`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ._comm import Transfer
from .errors import fail
from .shard_map import ShardMapped, dry_run
from .show.table import size
from .spec import format_axes


@dataclass(frozen=True, repr=False)
class Checked:
    """What `check` found: the described result, and every collective of one rank with the line that called it."""

    mesh: dict[str, int]
    result: Any
    transfers: tuple[Transfer, ...]

    def __repr__(self) -> str:
        axes = format_axes(self.mesh)
        n = math.prod(self.mesh.values())
        total = size(sum(t.bytes for t in self.transfers))
        count = f"{len(self.transfers)} transfers" if len(self.transfers) != 1 else "1 transfer"
        lines = [f"checked on {n} ranks ({axes}): {count} of each, {total}"]
        kinds: Counter[tuple[str, str, str]] = Counter()
        moved_by: Counter[tuple[str, str, str]] = Counter()
        for t in self.transfers:
            kind = (t.op, "+".join(t.axes), t.phase)
            kinds[kind] += 1
            moved_by[kind] += t.bytes
        for (op, over, phase), many in kinds.most_common():
            lines.append(f"  {many:5d}  {op:<14} {over:<12} {phase:<8} {size(moved_by[op, over, phase]):>10}")
        return "\n".join(lines)


def check(f: ShardMapped, *args: Any) -> Checked:
    """Check what every tensor of `f` varies over, forward and backward, with no data and no devices.

    The first rank of an abstract mesh runs `f` on fake tensors: the mesh of `f`, or for any other size that of
    `f.on(make_mesh(kind="abstract", ...))`. Arguments may be `Deferred`, `Sharded` or tensors, of which only shapes and
    dtypes matter. Dims of the result that the mesh may not divide are given as if it did, rounded up. Python numbers
    that differ between ranks are not seen: there is one rank.

    >>> step = shard_map(lambda x: psum(x.sum(), "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> check(step, fs.init.zeros((8, 3)))
    checked on 4 ranks (data=4): 1 transfer of each, 4 B
          1  all_reduce     data         forward         4 B

    Raises ShardingError at the line that breaks a rule, as `shard_map(check=...)` does, and for a program that needs
    the value of a tensor.
    """
    if not isinstance(f, ShardMapped):
        raise fail(f"check: {f!r} is a {type(f).__name__}", fix="check what fs.shard_map gives")
    result, mesh = dry_run(f, args)
    return Checked(dict(mesh.axes), result, tuple(mesh.transfers))


__all__ = ["Checked", "check"]

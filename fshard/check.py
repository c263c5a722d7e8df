"""Check the types of a program without data, on a mesh of any size."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ._comm import Transfer
from .errors import checked
from .shard_map import ShardMapped, dry_run
from .show.table import size
from .spec import format_axes


@dataclass(frozen=True, repr=False)
class Checked:
    """Outcome of `check`: the described result, and every collective of one rank with the line that called it."""

    mesh: dict[str, int]
    result: Any
    transfers: tuple[Transfer, ...]

    def __repr__(self) -> str:
        axes = format_axes(self.mesh)
        n = math.prod(self.mesh.values())
        total = size(sum(t.bytes for t in self.transfers))
        count = f"{len(self.transfers)} transfers" if len(self.transfers) != 1 else "1 transfer"
        lines = [f"checked on {n} ranks ({axes}): {count} of each, {total}"]
        counts: Counter[tuple[str, str, str]] = Counter()
        nbytes: Counter[tuple[str, str, str]] = Counter()
        for t in self.transfers:
            row = (t.op, "+".join(t.axes), t.phase)
            counts[row] += 1
            nbytes[row] += t.bytes
        for (op, axes, phase), n in counts.most_common():
            lines.append(f"  {n:5d}  {op:<14} {axes:<12} {phase:<8} {size(nbytes[op, axes, phase]):>10}")
        return "\n".join(lines)


@checked
def check(f: ShardMapped, *args: Any) -> Checked:
    """Check over which axes every tensor of `f` varies, forward and backward, without data or devices.

    The first rank of an abstract mesh runs `f` on fake tensors: the mesh of `f`, or for any other size that of
    `f.on(make_mesh(kind="abstract", ...))`. Arguments may be `Deferred`, `Sharded` or tensors: only shapes and dtypes
    matter. Dims of the result that the mesh does not divide are rounded up. Python numbers that differ between ranks
    are not found, as there is only one rank.

    >>> step = shard_map(lambda x: psum(x.sum(), "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> check(step, fs.init.zeros((8, 3)))
    checked on 4 ranks (data=4): 1 transfer of each, 4 B
          1  all_reduce     data         forward         4 B

    Raises ShardingError at the line that breaks a rule, as `shard_map(check=...)` does, and for a program that needs
    the value of a tensor.
    """
    result, mesh = dry_run(f, args)
    return Checked(dict(mesh.axes), result, tuple(mesh.transfers))

"""The types of a program, checked without data, on a mesh of any size: `check`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from . import source
from .comm import Transfer, recording
from .errors import fail
from .shard_map import ShardMapped, dry_run


@dataclass(frozen=True, repr=False)
class Checked:
    """What `check` found: the described result, and every collective of one rank with the line that called it."""

    mesh: dict[str, int]
    result: Any
    transfers: tuple[Transfer, ...]

    def __repr__(self) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in self.mesh.items())
        n = math.prod(self.mesh.values())
        moved = _bytes(sum(t.bytes for t in self.transfers))
        lines = [f"checked on {n} ranks ({axes}): {len(self.transfers)} transfers a rank, {moved}"]
        kinds: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for t in self.transfers:
            kind = (t.op, "+".join(t.axes), t.phase)
            kinds[kind] += 1
            sizes[kind] += t.bytes
        for (op, over, phase), count in kinds.most_common():
            lines.append(f"  {count:5d}  {op:<14} {over:<12} {phase:<8} {_bytes(sizes[op, over, phase]):>10}")
        return "\n".join(lines)


def check(f: ShardMapped, *args: Any) -> Checked:
    """Check what every tensor of `f` varies over, forward and backward, with no data and no devices.

    One rank of an abstract mesh runs `f` on fake tensors: the mesh of `f`, or `f.on(make_mesh(kind="abstract", ...))`
    for any other size. Arguments may be `Deferred`, `Sharded` or tensors, of which only shapes and dtypes matter. The
    dims of the result that the mesh may not divide are given as if it did, rounded up.

    >>> step = shard_map(lambda x: psum(x.sum(), "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> check(step, fs.init.zeros((8, 3)))
    checked on 4 ranks (data=4): 1 transfers a rank, 4 B
          1  all_reduce     data         forward         4 B

    Raises ShardingError at the line that breaks a rule, as `shard_map(check=...)` does, and for a program that needs
    the value of a tensor.
    """
    if not isinstance(f, ShardMapped):
        raise fail(f"check: {f!r} is a {type(f).__name__}", fix="check what fs.shard_map gives")
    with recording() as log:
        try:
            result = dry_run(f, args)
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            frame = next((t for t in _frames(e) if source.user_frame(t) is t), None)
            where = f"{source.site(frame)}: " if frame is not None else ""
            raise fail(f"{where}check has no data, and this needs the value of a tensor: {e}",
                       fix="keep it a tensor (torch.where, indexing by tensors); or check with data, by "
                           'fs.shard_map(..., check="always")') from e  # fmt: skip
    return Checked(dict(f.mesh.axes), result, tuple(log))


def _frames(e: BaseException) -> list[Any]:
    """The frames of a traceback, the innermost first."""
    found, at = [], e.__traceback__
    while at is not None:
        found.append(at.tb_frame)
        at = at.tb_next
    return found[::-1]


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            break
        n /= 1024  # type: ignore[assignment]
    return f"{n:.4g} {unit}"


__all__ = ["Checked", "check"]

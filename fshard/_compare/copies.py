"""What ranks that are threads hold of results that are one value on all of them, compared side by side."""

from __future__ import annotations

from typing import Any

from fshard import tree
from fshard.errors import ShardingError, fail
from fshard.sharded import Sharded

from .diff import Allowed, largest, wide


def apart(name: str, results: Any, allowed: Allowed) -> list[ShardingError]:
    """The errors of results of which ranks hold different values, over an axis that their spec does not name.

    Of simulated ranks, that is: on a process mesh no process has what another holds.
    """
    errors = []
    for path, x in tree.leaves_with_path(results):
        for axis, n in x.mesh.axes.items() if isinstance(x, Sharded) and x.mesh.kind == "simulated" else ():
            if n == 1 or axis in x.spec.axes:
                continue
            held = {tuple(x.mesh.coords(r).items()): s for r, s in zip(x.mesh.ranks, x.shards, strict=True)}
            pairs = [(s, held[tuple({**dict(at), axis: 0}.items())]) for at, s in held.items()]
            off = [(s, s0) for s, s0 in pairs if bool((allowed.off(s, s0) & ~(s.isnan() & s0.isnan())).any())]
            if off:
                error = max(largest(wide(s) - wide(s0)) for s, s0 in off)
                errors.append(fail(
                    f"{name}: {tree.show('result', path)} is not one value: ranks of {axis!r} hold different ones",
                    f"they differ by up to {error:.2g}", spec=x.spec,
                    fix=f"psum or pmean it over {axis!r}, or name {axis!r} in its out spec; look for a Python number\n"
                        "       or branch of a rank's own, which no type sees"))  # fmt: skip
    return errors


__all__ = ["apart"]

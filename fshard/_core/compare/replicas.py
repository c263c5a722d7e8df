"""Comparison of replicas: the local values of a leaf on ranks of an axis that its spec does not name.

Ranks that are threads compare values side by side, within a tolerance. Any ranks compare digests, in one transfer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.protocol import Comm
from fshard._core.region import region
from fshard.errors import ShardingError, fail, join_limited
from fshard.sharded import Sharded
from fshard.spec import P, describe, format_axes, is_spec

from .diff import Tolerance, max_finite_magnitude, widen
from .digest import digest_and_value, format_digest


def replica_errors(name: str, results: Any, tolerances: Tolerance | Sequence[Tolerance]) -> list[ShardingError]:
    """Return the errors of results on a simulated mesh whose replicas differ by more than the tolerance of the leaf."""
    errors = []
    for i, (path, x) in enumerate(tree.leaves_with_path(results)):
        if not isinstance(x, Sharded) or x.mesh.kind != "simulated":
            continue
        tolerance = tolerances if isinstance(tolerances, Tolerance) else tolerances[i]
        for axis, n in x.mesh.axes.items():
            if n == 1 or axis in x.spec.axes:
                continue
            firsts = _firsts(tuple(x.mesh.axes.items()), axis)
            pairs = [(shard, x.shards[first]) for shard, first in zip(x.shards, firsts, strict=True)]
            wrong = [(s, first) for s, first in pairs if not torch.equal(s, first) and tolerance.differs(s, first)]
            if wrong:
                error = max(max_finite_magnitude(widen(s) - widen(first)) for s, first in wrong)
                errors.append(fail(
                    f"{name}: {tree.show('result', path)} is not one value: it differs between ranks of {axis!r}",
                    f"they differ by up to {error:.2g}", spec=x.spec,
                    fix=f"psum or pmean it over {axis!r}, or name {axis!r} in its out spec; look for a Python number\n"
                        "       or a branch that depends on the rank, which the checker cannot see"))  # fmt: skip
    return errors


@functools.lru_cache(maxsize=256)
def _firsts(axes: tuple[tuple[str, int], ...], axis: str) -> list[int]:
    """Return, for each rank of a mesh, the rank at the same coordinates but position 0 on `axis`."""
    names, sizes = zip(*axes, strict=True)
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    return ranks.narrow(names.index(axis), 0, 1).expand(sizes).flatten().tolist()


def sum_over_ranks(x: Any, axes: Iterable[str]) -> tuple[Tensor, int] | None:
    """Return the full leaf, summed over the ranks of those axes that its spec does not name, and their number.

    The sum is in double precision. None where there is nothing to sum: no such axis, or a mesh that is not simulated.
    """
    over = [a for a in axes if a not in x.spec.axes] if isinstance(x, Sharded) and x.mesh.kind == "simulated" else []
    if not over:
        return None
    total = torch.zeros(x.shape, dtype=torch.complex128 if x.dtype.is_complex else torch.float64)
    for rank, part in zip(x.mesh.ranks, x.shards, strict=True):
        if not any(at for a, at in x.mesh.coords(rank).items() if a not in over and a not in x.spec.axes):
            total[x.box(rank)] += widen(part.detach().cpu())
    return total, math.prod(x.mesh.axes[a] for a in over)


@dataclass(frozen=True)
class Mismatch:
    """A leaf that is not the same along an axis, at the first coordinates on the other axes where it differs."""

    leaf: int
    axis: str
    at: dict[str, int]  # coordinates on the other axes
    digests: list[tuple[int, int, int]]  # `digest_and_value` by position along the axis


def find_mismatches(comm: Comm, leaves: Sequence[Tensor], specs: Sequence[P], device: torch.device) -> list[Mismatch]:
    """Return where leaves differ along an axis that their specs do not name; the same list on every rank.

    Costs one all_gather of 24 bytes for each leaf that is replicated over any axis. Every rank must pass the same
    specs. `device` is the one that `comm` works on.
    """
    live = tuple(a for a, n in comm.sizes.items() if n > 1)
    replicated = [i for i, spec in enumerate(specs) if set(live) - set(spec.axes)]
    if not replicated:
        return []
    mine = torch.stack([digest_and_value(leaves[i]).to(device) for i in replicated])  # [leaves, 3]
    sizes = [comm.sizes[a] for a in live]
    grid = comm.all_gather(mine, live).cpu().view(*sizes, len(replicated), 3)
    mismatches = compare_digests(grid, live, [specs[i] for i in replicated])
    return [replace(m, leaf=replicated[m.leaf]) for m in mismatches]


def compare_digests(grid: Tensor, live: Sequence[str], specs: Sequence[P]) -> list[Mismatch]:
    """Return where digests differ along an axis that the specs do not name: [*sizes of `live`, leaves, 3]."""
    mismatches = []
    for d, axis in enumerate(live):
        wrong = (grid != grid.narrow(d, 0, 1)).any(-1).any(d)  # [*the other sizes, leaves]
        for j in wrong.reshape(-1, len(specs)).any(0).nonzero().flatten().tolist():
            if axis in specs[j].axes:
                continue
            place = wrong[..., j].nonzero()[0].tolist()
            at = dict(zip([a for a in live if a != axis], place, strict=True))
            line = grid[(*place[:d], slice(None), *place[d:], j)]
            mismatches.append(Mismatch(j, axis, at, [tuple(row) for row in line.tolist()]))
    return sorted(mismatches, key=lambda m: m.leaf)


def check_replicas(name: str, out: Any, specs: Any) -> None:
    """Compare, between the ranks of each axis, every tensor of `out` that its spec does not split over that axis.

    Called on every rank, inside the region of function `name`, outside every transform, once the ranks are known to
    have returned the same tree; `specs` is a prefix of `out`. Costs one read of the leaves and what `find_mismatches`
    does.

    Raises ShardingError, the same on every rank, for results that differ in any bit.
    """
    here = region("check_replicas")
    leaf_specs = tree.broadcast(specs, out, name=f"{name}: out_specs", leaf=is_spec)
    rows = [(path, x, s) for (path, x), s in zip(tree.leaves_with_path(out), leaf_specs, strict=True)
            if isinstance(x, Tensor)]  # fmt: skip
    mismatches = find_mismatches(here.comm, [x for _, x, _ in rows], [s for _, _, s in rows], here.device)
    if not mismatches:
        return
    path, x, spec = rows[mismatches[0].leaf]
    of_leaf = [m for m in mismatches if m.leaf == mismatches[0].leaf]
    axes = " and ".join(repr(m.axis) for m in of_leaf)
    notes = [format_mismatch(m, x) for m in of_leaf]
    others = [tree.show("result", rows[i][0]) for i in sorted({m.leaf for m in mismatches})[1:]]
    if others:
        notes.append(f"so {'does' if len(others) == 1 else 'do'} {join_limited(others, 4)}")
    raise fail(f"{name}: {tree.show('result', path)} differs between ranks of {axes}, over which its spec says it is "
               "one value", *notes, "usual causes: a Python number that depends on the rank, a kernel that is not "
               "deterministic, a draw from torch's own generator",
               fix=f"psum or pmean it, draw with fs.random and a key, or name {axes} in its out spec",
               leaf=describe(x), spec=spec, mesh=format_axes(here.sizes))  # fmt: skip


def format_mismatch(mismatch: Mismatch, x: Tensor) -> str:
    """Format the values on the ranks of the axis: `data=0,2: 1.5    data=1,3: 2.5    (at model=0)`."""
    ranks: dict[tuple[int, int, int], list[str]] = {}
    for i, words in enumerate(mismatch.digests):
        ranks.setdefault(words, []).append(str(i))
    texts = [format_digest(words, x) for words in ranks]
    if len(set(texts)) < len(texts):  # different digests of equal texts: two NaNs, or two dtypes
        texts = [format_digest(words) for words in ranks]
    axis = mismatch.axis
    values = [f"{axis}={join_limited(r, 8, ',')}: {text}" for r, text in zip(ranks.values(), texts, strict=True)]
    at = [f"(at {', '.join(f'{a}={i}' for a, i in mismatch.at.items())})"] if mismatch.at else []
    more = [f"and {len(values) - 6} more"] if len(values) > 6 else []
    return "    ".join([*values[:6], *more, *at])

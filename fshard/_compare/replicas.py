"""Whether ranks hold the same values where a spec says so: digests of what is replicated, compared in one transfer."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard import tree
from fshard._comm import Comm, region
from fshard.errors import fail
from fshard.spec import P, describe, format_axes, is_spec

# --- digests --------------------------------------------------------------------------------------------------


def digest(x: Tensor) -> Tensor:
    """Two words for the shape, the dtype and every bit of a tensor: int64 [2], on its device.

    Equal for bitwise equal tensors however they are strided; unequal for others, but once in 2^60 or so. A NaN equals
    itself, and -0.0 is not 0.0. Reads the tensor once, with at most 16 MiB of extra memory. Comparable within one
    device type.

    The bytes are cut into chunks of 32-bit words v, and a chunk's words are sum(a_i v_i) and sum(b_i v_i) mod 2^64,
    with random 64-bit a and b. Since no word differs by 2^32 or more, each of the sums is the same for two different
    chunks with a chance of at most 2^-33. (Of 64-bit v it would be 1/2 where two signs are flipped: 2^63 a_i + 2^63 a_j
    is often 0.) The words of all chunks are then digested likewise, with other weights.

    Source: Dietzfelbinger, 1996, "Universal hashing and k-wise independent random variables via integer arithmetic".
    """
    kind = f"{x.dtype} {list(x.shape)}".encode()
    label = torch.tensor(struct.unpack("<2q", hashlib.blake2b(kind, digest_size=16).digest()), device=x.device)
    sums, level = _sums(x.detach(), 0), 1
    while len(sums) > 1:
        sums, level = _sums(sums, level), level + 1
    return sums[0] + label


def _sums(x: Tensor, level: int) -> Tensor:
    """The two weighted sums of every chunk: int64 [chunks, 2]."""
    words = _chunk(x.device.type)
    step = words * 4 // x.element_size()
    out = torch.zeros(max(1, -(-x.numel() // step)), 2, dtype=torch.int64, device=x.device)
    weights = _weights(level, x.device)
    room = torch.empty(min(words, -(-x.numel() * x.element_size() // 4)), dtype=torch.int64, device=x.device)
    for row, start in zip(out, range(0, x.numel(), step), strict=False):  # of no elements the sums stay 0
        v = _words(span(x, start, min(start + step, x.numel())))
        wide = room[: len(v)].copy_(v)
        for word, weight in zip(row, weights, strict=True):
            # On a CPU `dot` makes no array of the products; on CUDA there is none for integers.
            word.copy_(torch.dot(wide, weight[: len(v)]) if x.is_cpu else (wide * weight[: len(v)]).sum())
    return out


def _chunk(device: str) -> int:
    """Words at a time: what stays in a core's cache; enough for a kernel to be worth its launch elsewhere."""
    return 1 << (15 if device == "cpu" else 17)


@functools.lru_cache(maxsize=16)
def _weights(level: int, device: torch.device) -> Tensor:
    """Random 64-bit words, the same on every rank: int64 [2, chunk]. NumPy promises never to change this stream."""
    raw = np.random.Philox(key=level).random_raw(2 * _chunk(device.type))
    return torch.from_numpy(raw.view(np.int64)).view(2, -1).to(device)


def span(x: Tensor, start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` in the order of their indices, [stop - start]; copies no more than these."""
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    row = x.numel() // x.shape[0]
    first, last = start // row, stop // row
    if first == last:
        return span(x[first], start - first * row, stop - first * row)
    parts = [span(x[first], start % row, row)] if start % row else []
    parts.append(x[first + len(parts) : last].reshape(-1))
    if stop % row:
        parts.append(span(x[last], 0, stop % row))
    return torch.cat(parts)


def _words(x: Tensor) -> Tensor:
    """The bytes of a 1-d tensor as int32, with zeros up to a full word."""
    x = x.resolve_conj().resolve_neg()
    if len(x) == 1:  # contiguous with any stride, which a view as bytes does not believe
        x = x.clone(memory_format=torch.contiguous_format)
    raw = x.view(torch.uint8)
    if len(raw) % 4 or raw.storage_offset() % 4:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4)) if len(raw) % 4 else raw.clone()
    return raw.view(torch.int32)


# --- comparison -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disagreement:
    """A leaf that is not the same along an axis; `held` is what each of its ranks holds, at one place `at` it."""

    leaf: int
    axis: str
    at: dict[str, int]  # coordinates on the other axes
    held: list[tuple[int, int, int]]  # digest, and the value of a 0-d leaf, by position along the axis


def differing(comm: Comm, leaves: Sequence[Tensor], specs: Sequence[P], device: torch.device) -> list[Disagreement]:
    """Where leaves differ along an axis that their specs do not name; the same on every rank.

    Costs one all_gather of 24 bytes for each leaf that is replicated over anything. Every rank must give the same
    specs. `device` is the one that `comm` works on.
    """
    live = tuple(a for a, n in comm.sizes.items() if n > 1)
    some = [i for i, spec in enumerate(specs) if set(live) - set(spec.axes)]
    if not some:
        return []
    mine = torch.stack([fingerprint(leaves[i]).to(device) for i in some])  # [leaves, 3]
    sizes = [comm.sizes[a] for a in live]
    grid = comm.all_gather(mine, live).cpu().view(*sizes, len(some), 3)
    found = unequal(grid, live, [specs[i] for i in some])
    return [replace(f, leaf=some[f.leaf]) for f in found]


def unequal(grid: Tensor, live: Sequence[str], specs: Sequence[P]) -> list[Disagreement]:
    """Where fingerprints differ along an axis that the specs do not name: [*sizes of `live`, leaves, 3]."""
    found = []
    for d, axis in enumerate(live):
        wrong = (grid != grid.narrow(d, 0, 1)).any(-1).any(d)  # [*the other sizes, leaves]
        for j in wrong.reshape(-1, len(specs)).any(0).nonzero().flatten().tolist():
            if axis in specs[j].axes:
                continue
            place = wrong[..., j].nonzero()[0].tolist()
            at = dict(zip([a for a in live if a != axis], place, strict=True))
            line = grid[(*place[:d], slice(None), *place[d:], j)]
            found.append(Disagreement(j, axis, at, [tuple(row) for row in line.tolist()]))
    return sorted(found, key=lambda f: f.leaf)


def fingerprint(x: Tensor) -> Tensor:
    """The digest, and the value of a 0-d leaf in 64 bits, for an error to show: int64 [3]."""
    return torch.cat([digest(x), _value(x)])


def _value(x: Tensor) -> Tensor:
    """int64 [1]; 0 for a leaf that is not 0-d."""
    if x.ndim or x.is_complex():
        return torch.zeros(1, dtype=torch.int64, device=x.device)
    x = x.detach().reshape(1)
    return x.to(torch.float64).view(torch.int64) if x.is_floating_point() else x.to(torch.int64)


def check_replicas(name: str, out: Any, specs: Any) -> None:
    """Compare, between the ranks of each axis, every tensor of `out` that its spec does not split over that axis.

    Called on every rank, inside the region of function `name`, outside every transform, once the ranks are known to
    have returned the same tree; `specs` is a prefix of `out`. Costs what `differing` does, and one read of the leaves.

    Raises ShardingError, the same on every rank, for results that differ in any bit.
    """
    where = region("check_replicas")
    flat = tree.broadcast(specs, out, name=f"{name}: out_specs", leaf=is_spec)
    rows = [(path, x, s) for (path, x), s in zip(tree.leaves_with_path(out), flat, strict=True)
            if isinstance(x, Tensor)]  # fmt: skip
    found = differing(where.comm, [x for _, x, _ in rows], [s for _, _, s in rows], where.device)
    if not found:
        return
    path, x, spec = rows[found[0].leaf]
    here = [f for f in found if f.leaf == found[0].leaf]
    axes = " and ".join(repr(f.axis) for f in here)
    notes = [told(f, x) for f in here]
    others = [tree.show("result", rows[i][0]) for i in sorted({f.leaf for f in found})[1:]]
    if others:
        notes.append(f"so {'does' if len(others) == 1 else 'do'} {join_limited(others, 4)}")
    raise fail(f"{name}: {tree.show('result', path)} differs between ranks of {axes}, over which its spec says it is "
               "one value", *notes, "a Python number that depends on the rank does this, a kernel that is not "
               "deterministic, or a draw from torch's own generator",
               fix=f"psum or pmean it, draw with fs.random and a key, or name {axes} in its out spec",
               leaf=describe(x.dtype, x.shape), spec=spec,
               mesh=format_axes(where.sizes))  # fmt: skip


def told(found: Disagreement, x: Tensor) -> str:
    """`data=0,2: 1.5    data=1,3: 2.5    (at model=0)`."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for i, words in enumerate(found.held):
        groups.setdefault(words, []).append(str(i))
    texts = [_word(words, x) for words in groups]
    if len(set(texts)) < len(texts):  # two NaNs, say, or two dtypes
        texts = [_digest(words) for words in groups]
    shown = [f"{found.axis}={join_limited(r, 8, ',')}: {text}" for r, text in zip(groups.values(), texts, strict=True)]
    at = [f"(at {', '.join(f'{a}={i}' for a, i in found.at.items())})"] if found.at else []
    more = [f"and {len(shown) - 6} more"] if len(shown) > 6 else []
    return "    ".join([*shown[:6], *more, *at])


def _word(words: tuple[int, int, int], x: Tensor) -> str:
    """The value of a 0-d leaf, the digest of any other."""
    value = words[2]
    if x.ndim or x.is_complex():
        return _digest(words)
    if not x.is_floating_point():
        return str(bool(value)) if x.dtype == torch.bool else str(value)
    (number,) = struct.unpack("<d", struct.pack("<q", value))
    return format(number, ".17g" if x.dtype == torch.float64 else ".9g")


def _digest(words: tuple[int, int, int]) -> str:
    return f"digest {words[0] & 0xFFFFFFFF:08x}"


def join_limited(items: Sequence[str], most: int, gap: str = ", ") -> str:
    rest = len(items) - most
    return gap.join(items) if rest <= 0 else f"{gap.join(items[:most])}{gap.rstrip()} and {rest} more"


__all__ = ["Disagreement", "check_replicas", "differing", "digest", "fingerprint", "join_limited", "span", "told",
           "unequal"]  # fmt: skip

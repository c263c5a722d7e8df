"""Attention over a mesh axis that splits the positions: context parallelism.

A region's arguments have their tokens in order. With causal attention a rank with late positions then has more work
than one with early ones, so the region moves them to the zigzag order: of 2n chunks, rank r has numbers r and 2n-1-r.

Legend: B batch, H heads of queries, G of keys and values, T positions, K head width, n ranks of the axis;
[T@axis] is a dim split over the axis.
Source: Liu et al., 2023, "Ring attention"; Jacobs et al., 2023, "DeepSpeed Ulysses"; the zigzag order of Zhu, 2024,
"ring-flash-attention"; gathered keys and values as in the Llama 3 report, 2024.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard._core.ops import Permute, apply_map, dim_of, global_size, start_map
from fshard._core.packing import pad
from fshard._core.protocol import coords_of, index_of, size_of
from fshard._core.region import checker, has_values, known_axes, live_axes, region, unchecked
from fshard._core.torch import unwrapped
from fshard.collectives import all_gather, all_to_all
from fshard.errors import checked, fail, must_be
from fshard.spec import Axis, part_range

from .flash import additive, apply_fused, block, block_backward, has_kernel
from .layers import check_groups

Order = Literal["zigzag", "contiguous"]


class Piece(NamedTuple):
    """Neighbouring positions, from `start` to before `stop`, that are in one rank's memory from `at` on."""

    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.stop - self.start


@dataclass(frozen=True)
class _Split:
    """The positions of a sequence of `size` over the ranks of axes of these `sizes`; this rank is number `me`."""

    size: int
    sizes: tuple[int, ...]
    me: int
    order: Order

    @staticmethod
    def make(verb: str, name: str, n: int, axes: tuple[str, ...], order: Order, size: int | None) -> _Split:
        """Return the split of the positions of an argument with this `name`; this rank has `n` positions."""
        split = _Split.from_size(verb, global_size(verb, n, axes) if size is None else size, axes, order)
        if n != (mine := sum(p.length for p in split.pieces(split.me))):
            raise fail(f"{verb}: {name} has {n} positions here, and this rank's part in {order} order is {mine}",
                       size=split.size, axis=axes, fix="pass the global size=")  # fmt: skip
        return split

    @staticmethod
    def from_size(verb: str, size: int, axes: tuple[str, ...], order: Order) -> _Split:
        """Return the split of a sequence of this size."""
        current = region(verb)
        if size < 0:
            raise fail(f"{verb}: size={size}", fix="0 or more")
        me = index_of(axes, current.sizes, current.coords)
        return _Split(size, tuple([current.sizes[a] for a in axes]), me, order)

    @property
    def n(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def longest(self) -> int:
        """The length of the longest part, by any order."""
        return -(-self.size // self.n)

    @property
    def half(self) -> int:
        """The length of the longest chunk."""
        return -(-self.longest // 2)

    @functools.cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """The (start, stop) of 2n chunks: two for each rank, if it has its positions in order."""
        out = []
        for r in range(self.n):
            start, length = part_range(self.size, self.sizes, coords_of(r, self.sizes))
            middle = start + min(self.half, length)
            out += [(start, middle), (middle, start + length)]
        return out

    def numbers(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the two chunks of a rank."""
        return (rank, 2 * self.n - 1 - rank) if self.order == "zigzag" else (2 * rank, 2 * rank + 1)

    def pieces(self, rank: int) -> list[Piece]:
        """Return the two pieces of a rank; one or both may be empty."""
        (a, b), (c, d) = (self.chunks[i] for i in self.numbers(rank))
        return [Piece(a, b, 0), Piece(c, d, b - a)]

    def joined(self, ranks: range) -> list[Piece]:
        """Return the pieces of some ranks by position, with their places where their padded parts are joined."""
        pieces = [p._replace(at=i * self.longest + p.at) for i, r in enumerate(ranks) for p in self.pieces(r)]
        return sorted(p for p in pieces if p.length)


# --- the order of the tokens ------------------------------------------------------------------------------------


@checked
def to_zigzag(x: Any, axis: Axis, dim: int = 1, *, size: int | None = None) -> Any:
    """Move positions from their order to the zigzag order: of 2n chunks, rank r gets numbers r and 2n-1-r.

        [B, T@axis]{V} -> [B, T@axis in zigzag order]{V}     transpose: from_zigzag     cost: at most bytes

    `size` is the global T, needed only if the axis does not divide it. x may be a tree.

    >>> moved = to_zigzag(ids, "seq")                                # seq=2, T=8: ranks get 0 1 6 7 and 2 3 4 5

    Raises ShardingError if this rank does not have its part of `size`.
    """
    return _reorder("to_zigzag", x, axis, dim, size)


@checked
def from_zigzag(x: Any, axis: Axis, dim: int = 1, *, size: int | None = None) -> Any:
    """Move positions from the zigzag order back to their order; see `to_zigzag`, its transpose.

    >>> torch.equal(from_zigzag(to_zigzag(ids, "seq"), "seq"), ids)
    True
    """
    return _reorder("from_zigzag", x, axis, dim, size)


def _reorder(verb: str, x: Any, axis: Axis, dim: int, size: int | None) -> Any:
    axes = live_axes(region(verb).comm, known_axes(verb, region(verb), axis))
    orders: tuple[Order, Order] = ("contiguous", "zigzag") if verb == "to_zigzag" else ("zigzag", "contiguous")

    def move(x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise must_be(f"{verb}: x", "a Tensor or a tree of Tensors", x)
        d = dim_of(f"{verb}: x", x, dim)
        before = _Split.make(verb, "x", x.shape[d], axes, orders[0], size)
        if not axes:
            return x
        after = replace(before, order=orders[1])
        sent, kept = before.numbers(before.me), after.numbers(after.me)
        chunks = {i: pad(x.narrow(d, p.at, p.length), d, before.half)
                  for i, p in zip(sent, before.pieces(before.me), strict=True)}  # fmt: skip
        holders = {i: r for r in range(after.n) for i in after.numbers(r)}
        # Of two chunks of a rank one has an even number and one an odd number, in each order: a permute for each.
        for parity in (0, 1):
            pairs = tuple([(r, holders[i]) for r in range(before.n) for i in before.numbers(r) if i % 2 == parity])
            mine = next(i for i in sent if i % 2 == parity)
            (chunks[-1 - parity],) = apply_map(Permute(region(verb).comm, axes, pairs), [chunks[mine]])
        parts = [chunks[-1 - i % 2].narrow(d, 0, p.length) for i, p in zip(kept, after.pieces(after.me), strict=True)]
        return torch.cat(parts, d)

    return tree.map(move, x)


@checked
def zigzag_positions(size: int, axis: Axis) -> Tensor:
    """Return the global positions of this rank's tokens in the zigzag order, of a sequence of `size`: [T@axis] int64.

    >>> zigzag_positions(8, "seq")                                # seq=2: the first rank
    tensor([0, 1, 6, 7])
    """
    return positions_of("zigzag_positions", size, axis, "zigzag")


def positions_of(verb: str, size: int, axis: Axis, order: Order) -> Tensor:
    """Return the global positions of this rank's tokens in this order."""
    current = region(verb)
    axes = known_axes(verb, current, axis)
    split = _Split.from_size(verb, size, axes, order)
    out = _positions(split.pieces(split.me), current.device)
    if current.checker is not None:
        current.checker.set_integer_type(out, verb, varies=axes)
    return out


def _positions(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(p.start, p.stop, device=device) for p in pieces])


# --- which queries meet which keys -----------------------------------------------------------------------------


class _Block(NamedTuple):
    """Queries and keys, each neighbours in memory, and which of them meet: all, some by a mask, or a causal square."""

    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    kind: Literal["all", "mask", "causal"]

    @property
    def rows(self) -> slice:
        """The places of the queries in memory."""
        return slice(self.queries[0].at, self.queries[-1].at + self.queries[-1].length)

    @property
    def columns(self) -> slice:
        """The places of the keys in memory."""
        return slice(self.keys[0].at, self.keys[-1].at + self.keys[-1].length)


class _Rule:
    """A rule for the positions that one attends to: all, or those up to itself; the last `window`; of its document.

    `documents` [B, T] are numbers by position. Where they have no values, all documents may meet.
    """

    def __init__(self, causal: bool, window: int | None, documents: Tensor | None) -> None:
        self.causal, self.window = causal, math.inf if window is None else window
        self.has_documents = documents is not None
        self._numbers: Tensor | None = None
        if documents is not None and has_values():
            with unchecked():
                self._numbers = unwrapped(documents).cpu()

    def kind(self, a: Piece, b: Piece) -> Literal["none", "all", "mask", "causal"]:
        """Return how queries of `a` and keys of `b` meet."""
        ahead = 0 if self.causal else self.window - 1
        if b.stop - 1 <= a.start - self.window or b.start > a.stop - 1 + ahead:
            return "none"
        same = not self.has_documents
        if self._numbers is not None:
            (a_low, a_high), (b_low, b_high) = (self._numbers[:, p.start : p.stop].aminmax(dim=1) for p in (a, b))
            if bool(((a_low > b_high) | (b_low > a_high)).all()):
                return "none"
            same = bool(((a_low == a_high) & (b_low == b_high) & (a_low == b_low)).all())
        if same and b.start > a.stop - 1 - self.window and b.stop - 1 <= a.start + ahead:
            return "all"
        is_square = self.causal and (a.start, a.stop) == (b.start, b.stop) and a.length <= self.window
        return "causal" if same and is_square else "mask"

    def blocks(self, queries: Sequence[Piece], keys: Sequence[Piece]) -> list[_Block]:
        """Return the blocks of queries that meet keys; the first one of a query has a key for it, if any has."""
        kinds = {(a, b): self.kind(a, b) for a in queries for b in keys}
        if queries == keys and all(kind == ("causal" if a == b else "all" if b < a else "none")
                                   for (a, b), kind in kinds.items()):  # fmt: skip
            return [_Block(tuple(queries), tuple(keys), "causal")] if queries else []
        out: list[_Block] = []
        for a in queries:
            runs: list[_Block] = []
            for b in keys:
                kind = kinds[a, b]
                if runs and runs[-1].kind == kind != "causal" and runs[-1].columns.stop == b.at:
                    runs[-1] = runs[-1]._replace(keys=(*runs[-1].keys, b))
                elif kind != "none":
                    runs.append(_Block((a,), (b,), kind))
            for run in sorted(runs, key=lambda run: run.kind == "mask" and a[:2] not in [b[:2] for b in run.keys]):
                for i, known in enumerate(out):
                    if known.kind == run.kind == "all" and known.keys == run.keys and known.rows.stop == a.at:
                        out[i] = known._replace(queries=(*known.queries, a))
                        break
                else:
                    out.append(run)
        return out

    def mask(self, block: _Block, documents: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the numbers to add to the scores of a block, [B or 1, 1, queries, keys], if it needs any."""
        if block.kind != "mask":
            return None
        q, k = (_positions(pieces, like.device) for pieces in (block.queries, block.keys))
        behind = q[:, None] - k
        allowed = behind >= 0 if self.causal else behind > -self.window
        allowed = (allowed & (behind < self.window))[None]
        if documents is not None:
            of_q, of_k = (torch.cat([documents[:, p.start : p.stop] for p in pieces], 1)
                          for pieces in (block.queries, block.keys))  # fmt: skip
            allowed = allowed & (of_q[:, :, None] == of_k[:, None, :])
        return additive(allowed[:, None], like.dtype)


# --- attention -------------------------------------------------------------------------------------------------

Method = Literal["ring", "gather", "ulysses"]


@checked
def context_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, method: Method | tuple[Method, Method] = "ring",
    order: Order = "zigzag", causal: bool = True, documents: Tensor | None = None, window: int | None = None,
    scale: float | None = None, size: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention over an axis that splits the positions: q [B, H, T@axis, K] -> [B, H, T@axis, K].

    k and v [B, G, T@axis, K] may have fewer heads, as in `attention`. The result does not depend on the method:

        method     bytes that a rank sends forward, backward             keys and values in its memory
        ring       (n-1) KV, (2n-1) KV                                   2 parts; 4 in backward
        gather     (n-1) KV, (n-1) KV                                    all
        ulysses    (n-1)/n (QO + KV), the same                           all, of H/n heads

    KV are the bytes of this rank's k and v, QO of q and the result. The ring passes keys and values from rank to rank
    while it computes; in half precision their gradients are summed, and sent, in float32. For `axis=(a, b)` a pair of
    methods is ("ring", "ulysses") or ("gather", "ulysses"): the second exchanges heads over b.

    Args:
        order: of the tokens, as the ranks have them: "zigzag" if `to_zigzag` moved them, which gives causal ranks equal
            work, or "contiguous".
        causal: a position attends to those up to itself; else to all.
        documents: [B, T@axis], numbers of packed documents: a position attends to its document. Parts of the keys that
            have no document in common with the queries are not computed.
        window: a position attends to the last `window` positions up to itself, or less than `window` away.
        size: T, needed only if the axis does not divide it.

    Derivatives are as of `attention_lse`; by the plain formula a ring is a gather. Source: Liu et al., 2023, "Ring
    attention"; see the module for others.

    >>> q, k, v = nn.to_zigzag((q, k, v), "seq", 2)                  # in a model, move the tokens instead
    >>> out = nn.from_zigzag(nn.context_attention(q, k, v, "seq"), "seq", 2)

    Raises ShardingError for shapes that do not fit, and if this rank does not have its part of `size`.
    """
    verb = "context_attention"
    current = region(verb)
    names = known_axes(verb, current, axis)
    methods = method if isinstance(method, tuple) else (method,)
    if "ulysses" in methods[:-1] or (len(methods) == 2 and (len(names) != 2 or methods[1] != "ulysses")):
        raise fail(f"{verb}: method={method} over {axis!r}",
                   fix='one method; or ("ring", "ulysses") or ("gather", "ulysses"), over two axes')  # fmt: skip
    if any(x.ndim != 4 for x in (q, k, v)) or k.shape[:3] != v.shape[:3] or q.shape[2] != k.shape[2]:
        raise fail(f"{verb}: q, k and v do not fit", q=list(q.shape), k=list(k.shape), v=list(v.shape),
                   fix="[B, heads, T, K] with as many positions in each")  # fmt: skip
    if documents is not None and tuple(documents.shape) != (len(q), q.shape[2]):
        raise fail(f"{verb}: documents need a number for each position", documents=list(documents.shape),
                   q=list(q.shape))  # fmt: skip
    if window is not None and window < 1:
        raise fail(f"{verb}: window={window}", fix="1 or more")
    check_groups(verb, q.shape[1], k.shape[1])
    inner = live_axes(current.comm, names[-1:] if len(methods) == 2 else names if methods == ("ulysses",) else ())
    outer = tuple([a for a in live_axes(current.comm, names) if a not in inner])
    split = _Split.make(verb, "q", q.shape[2], (*outer, *inner), order, size)
    if (types := checker()) is not None:
        types.check_operands("attention", [q, k, v])
    if documents is not None:
        documents = _gather(documents, (*outer, *inner), split.longest, split.joined(range(split.n)), 1)
    rule = _Rule(causal, window, documents)

    # 1. Over the inner axis exchange positions for heads. A group of ranks then has the same positions.
    heads, n_inner, n = q.shape[1], size_of(inner, current.sizes), size_of(outer, current.sizes)
    me = split.me // n_inner
    groups = [split.joined(range(g * n_inner, (g + 1) * n_inner)) for g in range(n)]
    if inner:
        k, v = (_split_heads(x, heads, n_inner) for x in (k, v))
        q, k, v = (_take(all_to_all(pad(x, 2, split.longest), inner, split=1, concat=2, size=n_inner * split.longest),
                         groups[me], 2) for x in (q, k, v))  # fmt: skip
    # 2. Over the outer axis bring keys and values to the queries.
    groups = [_compact(pieces) for pieces in groups]
    longest = max(sum(p.length for p in pieces) for pieces in groups)
    ring = None
    is_fused = has_kernel(q, k, v)
    if n > 1 and methods[0] == "ring" and is_fused:
        ring = Permute(current.comm, outer, tuple([(i, (i + 1) % n) for i in range(n)]))
        k, v = pad(k, 2, longest), pad(v, 2, longest)
        steps = [rule.blocks(groups[me], groups[(me - i) % n]) for i in range(n)]
    else:
        every = sorted(p._replace(at=g * longest + p.at) for g in range(n) for p in groups[g])
        k, v = (_gather(x, outer, longest, every, 2) for x in (k, v))
        steps = [rule.blocks(groups[me], _compact(every))]
        if not is_fused and groups[me]:  # one block, since merges have no second derivatives
            steps = [[_Block(tuple(groups[me]), tuple(_compact(every)), "mask")]]
    schedule = _Schedule(steps, ring, rule, q.shape[-1] ** -0.5 if scale is None else scale)
    out: Tensor
    out, _ = apply_fused(schedule, q, k, v, documents) if is_fused else schedule.forward(q, k, v, documents)
    # 3. Exchange back.
    if inner:
        places = {p[:2]: p.at for p in groups[me]}
        parts = [[p._replace(at=places[p[:2]]) for p in split.pieces(me * n_inner + i) if p.length]
                 for i in range(n_inner)]  # fmt: skip
        joined = torch.cat([pad(_take(out, pieces, 2), 2, split.longest) for pieces in parts], 2)
        out = all_to_all(joined, inner, split=2, concat=1, size=heads)
        out = out.narrow(2, 0, sum(p.length for p in split.pieces(split.me)))
    return out


def _compact(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with their places once `_take` has copied them."""
    ends = itertools.accumulate([p.length for p in pieces], initial=0)
    return [p._replace(at=at) for p, at in zip(pieces, ends, strict=False)]


def _take(x: Tensor, pieces: Sequence[Piece], dim: int) -> Tensor:
    """Return the pieces of a dim end to end."""
    if list(pieces) == _compact(pieces):
        return x.narrow(dim, 0, sum(p.length for p in pieces))
    return torch.cat([x.narrow(dim, p.at, p.length) for p in pieces], dim)


def _gather(x: Tensor, axes: tuple[str, ...], longest: int, pieces: Sequence[Piece], dim: int) -> Tensor:
    """Gather parts, padded to the `longest`, and take the pieces."""
    n = size_of(axes, region().sizes)
    return _take(all_gather(pad(x, dim, longest), axes, dim, size=n * longest), pieces, dim)


def _split_heads(x: Tensor, heads: int, n: int) -> Tensor:
    """Repeat heads of keys or values, if they are too few, so that each of n ranks has them for its queries."""
    groups = x.shape[1]
    needed = math.lcm(groups, n)
    return x if needed == groups else x.repeat_interleave((needed if heads % needed == 0 else heads) // groups, 1)


@dataclass(frozen=True, eq=False)
class _Schedule:
    """The blocks that a rank computes at each step; between two steps keys and values go on along the `ring`."""

    steps: list[list[_Block]]
    ring: Permute | None
    rule: _Rule
    scale: float
    verb = "context_attention"

    def start(self, i: int, xs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start to pass tensors on after step i; after the last one nothing is passed."""
        return start_map(self.ring, xs) if self.ring is not None and i + 1 < len(self.steps) else lambda: xs

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return attention and its log-sum-exp."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
        for i, blocks in enumerate(self.steps):
            wait = self.start(i, [k, v])
            for b in blocks:
                mask = self.rule.mask(b, documents, q)
                rows, columns = b.rows, b.columns
                x, x_lse = block(
                    q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, b.kind == "causal", self.scale
                )
                if b is self.steps[0][0] and x.shape[2] == q.shape[2]:
                    out, lse = x.to(wide), x_lse
                    continue
                before = lse[:, :, rows]
                total = torch.logaddexp(before, x_lse)
                x = out[:, :, rows] * _share(before, total) + x.to(wide) * _share(x_lse, total)
                out, lse = (torch.cat([y[:, :, : rows.start], part, y[:, :, rows.stop :]], 2)
                            for y, part in ((out, x), (lse, total)))  # fmt: skip
            k, v = wait()
        return out.to(q.dtype), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor,
        _: None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the gradients by q, k and v; keys and values travel with their gradients, which at last go home."""
        dq = torch.zeros_like(q, dtype=lse.dtype)
        arrived: Callable[[], Any] = list
        for i, blocks in enumerate(self.steps):
            wait = self.start(i, [k, v])
            dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
            for b in blocks:
                rows, columns = b.rows, b.columns
                grads = block_backward(grad[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns],
                                       out[:, :, rows], lse[:, :, rows], self.rule.mask(b, documents, q),
                                       b.kind == "causal", self.scale)  # fmt: skip
                for total, part, places in zip((dq, dk, dv), grads, (rows, columns, columns), strict=True):
                    total[:, :, places] += part
            for total, part in zip((dk, dv), arrived(), strict=i > 0):
                total += part
            if self.ring is not None:
                arrived = start_map(self.ring, [dk, dv])
            k, v = wait()
        if self.ring is not None:
            dk, dv = arrived()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _share(lse: Tensor, total: Tensor) -> Tensor:
    return (lse - total).exp().unsqueeze(-1)

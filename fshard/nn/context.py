"""Attention over a mesh axis that splits the positions: context parallelism.

Legend: B batch, H heads of queries, G of keys and values, T positions, K head width, n ranks of the axis;
[T@axis] is a dim split over the axis.
Source: Liu et al., 2023, "Ring attention"; Jacobs et al., 2023, "DeepSpeed Ulysses"; gathered keys and values as in the
Llama 3 report, 2024.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard._core.ops import Permute, global_size, own_range, start_map
from fshard._core.packing import pad
from fshard._core.protocol import size_of
from fshard._core.region import checker, has_values, known_axes, live_axes, region, unchecked
from fshard._core.torch import unwrapped
from fshard.collectives import all_gather, all_to_all
from fshard.errors import checked, fail
from fshard.random.draws import bernoulli_pieces
from fshard.spec import Axis, P

from .flash import additive, apply_fused, block, block_backward, has_kernel, plain
from .layers import check_groups, has_dropout
from .zigzag import Order, Piece, Split, compact, positions, take

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
    """A rule for the positions that one attends to: all, or those up to itself; the last `window`; by numbers.

    A query and a key meet if their numbers, [B, T, 2] by position, are equal. Where they have no values, all may meet.
    """

    def __init__(self, causal: bool, window: int | None, numbers: Tensor | None) -> None:
        self.causal, self.window = causal, math.inf if window is None else window
        self.has_numbers = numbers is not None
        self._numbers: Tensor | None = None
        if numbers is not None and has_values() and not torch.compiler.is_dynamo_compiling():
            with unchecked():
                self._numbers = unwrapped(numbers).cpu()

    def kind(self, a: Piece, b: Piece) -> Literal["none", "all", "mask", "causal"]:
        """Return how queries of `a` and keys of `b` meet."""
        ahead = 0 if self.causal else self.window - 1
        if b.stop - 1 <= a.start - self.window or b.start > a.stop - 1 + ahead:
            return "none"
        same = not self.has_numbers
        if self._numbers is not None:
            (a_low, a_high), (b_low, b_high) = (self._numbers[:, p.start : p.stop, i].aminmax(dim=1)
                                                for i, p in enumerate((a, b)))  # fmt: skip
            if bool(((a_low > b_high) | (b_low > a_high)).all()):
                return "none"
            same = bool(((a_low == a_high) & (b_low == b_high) & (a_low == b_low)).all())
        if same and b.start > a.stop - 1 - self.window and b.stop - 1 <= a.start + ahead:
            return "all"
        is_square = self.causal and (a.start, a.stop) == (b.start, b.stop) and a.length <= self.window
        return "causal" if same and is_square else "mask"

    def blocks(self, queries: Sequence[Piece], keys: Sequence[Piece]) -> list[_Block]:
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
            for run in runs:
                for i, known in enumerate(out):
                    if known.kind == run.kind == "all" and known.keys == run.keys and known.rows.stop == a.at:
                        out[i] = known._replace(queries=(*known.queries, a))
                        break
                else:
                    out.append(run)
        return out

    def mask(self, block: _Block, numbers: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the numbers to add to the scores of a block, [B or 1, 1, queries, keys], if it needs any."""
        if block.kind != "mask":
            return None
        q, k = (positions(pieces, like.device) for pieces in (block.queries, block.keys))
        behind = q[:, None] - k
        allowed = behind >= 0 if self.causal else behind > -self.window
        allowed = (allowed & (behind < self.window))[None]
        if numbers is not None:
            of_q, of_k = (torch.cat([numbers[:, p.start : p.stop, i] for p in pieces], 1)
                          for i, pieces in enumerate((block.queries, block.keys)))  # fmt: skip
            allowed = allowed & (of_q[:, :, None] == of_k[:, None, :])
        return additive(allowed[:, None], like.dtype)


# --- attention -------------------------------------------------------------------------------------------------

Method = Literal["ring", "gather", "ulysses"]


@checked
def context_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, method: Method | tuple[Method, Method] = "ring",
    order: Order = "zigzag", causal: bool = True, mask: Tensor | None = None, documents: Tensor | None = None,
    window: int | None = None, scale: float | None = None, size: int | None = None, rate: float = 0.0,
    key: Tensor | None = None, spec: P | None = None, shape: tuple[int, ...] | None = None,
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
        mask: [B, T@axis], 0 for padding, which no position attends to.
        documents: [B, T@axis], numbers of packed documents: a position attends to its document. Parts of the keys that
            have no document in common with the queries are not computed, but in a compiled program, which reads no
            values.
        window: a position attends to the last `window` positions up to itself, or less than `window` away.
        size: T, needed only by a compiled program where the axis does not divide it.
        rate, key: dropout of weights, as in `attention`, by the positions of a query and a key.
        spec, shape: of the global weights, [B, H, T, T] or [B, G, H/G, T, T]; `axis` splits T in any case.

    Derivatives are as of `attention_lse`. By the plain formula, which dropout needs, a ring is a gather: a rank has
    its part of all weights in memory, which is more than all keys. Source: Liu et al., 2023, "Ring
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
    given = [x for x in (mask, documents) if x is not None]
    if any(tuple(x.shape) != (len(q), q.shape[2]) for x in given):
        raise fail(f"{verb}: mask and documents need a number for each position", q=list(q.shape),
                   got=[list(x.shape) for x in given])  # fmt: skip
    if window is not None and window < 1:
        raise fail(f"{verb}: window={window}", fix="1 or more")
    check_groups(verb, q.shape[1], k.shape[1])
    inner = live_axes(current.comm, names[-1:] if len(methods) == 2 else names if methods == ("ulysses",) else ())
    outer = tuple([a for a in live_axes(current.comm, names) if a not in inner])
    split = Split.make(verb, (*outer, *inner), order, size, q.shape[2])
    if (types := checker()) is not None:
        types.check_operands("attention", [q, k, v])
    numbers = None
    if given:
        of_query = torch.zeros_like(given[0]).long() if documents is None else documents.long()
        of_key = of_query if mask is None else torch.where(mask != 0, of_query, torch.iinfo(torch.int64).min)
        numbers = all_gather(torch.stack([of_query, of_key], -1), (*outer, *inner), 1, size=split.size)
        numbers = take(numbers, sorted(split.pieces(*list(range(len(split.lengths))))), 1)
    rule = _Rule(causal, window, numbers)

    # 1. Over the inner axis exchange positions for heads. A group of ranks then has the same positions.
    batch, heads, n_inner, n = *q.shape[:2], size_of(inner, current.sizes), size_of(outer, current.sizes)
    me = split.me // n_inner
    members = [list(range(g * n_inner, (g + 1) * n_inner)) for g in range(n)]  # lists: dynamo cannot unpack a range
    groups = [sorted(split.pieces(*ranks)) for ranks in members]
    lengths = [sum(p.length for p in pieces) for pieces in groups]
    if inner:
        k, v = (_split_heads(x, heads, n_inner) for x in (k, v))
        q, k, v = (take(all_to_all(x, inner, split=1, concat=2, size=lengths[me]), groups[me], 2) for x in (q, k, v))
    # 2. Over the outer axis bring keys and values to the queries.
    groups = [compact(pieces) for pieces in groups]
    ring, drops = None, has_dropout(verb, rate, key)
    is_fused = has_kernel(q, k, v) and not drops
    if n > 1 and methods[0] == "ring" and is_fused:
        ring = Permute(current.comm, outer, tuple([(i, (i + 1) % n) for i in range(n)]))
        k, v = (pad(x, 2, max(lengths)) for x in (k, v))
        steps = [rule.blocks(groups[me], groups[(me - i) % n]) for i in range(n)]
    else:
        every = sorted(compact(list(itertools.chain(*groups))))
        k, v = (take(all_gather(x, outer, 2, size=split.size), every, 2) for x in (k, v))
        every = compact(every)
        steps = [rule.blocks(groups[me], every)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor
    if is_fused:
        out, _ = apply_fused(_Schedule(steps, ring, rule, scale), q, k, v, numbers)
    else:  # in one block, since merges have no second derivatives
        rows, columns = (tuple(pieces) or (Piece(0, 0, 0),) for pieces in (groups[me], every))
        drop = None
        if drops and key is not None:
            dims = (spec or P()).parts(len(shape or q.shape))[:-2]
            if twice := {*names} & {a for axes in dims for a in axes}:
                raise fail(
                    f"{verb}: spec={spec} names {sorted(twice)}, which split the positions",
                    fix="the axes that split the batch and the heads",
                )
            shape = shape or (*map(functools.partial(global_size, verb), (batch, heads), dims), split.size, split.size)
            placed = P(*[a or None for a in dims], names or None)
            keep = bernoulli_pieces(key, shape, len(shape) - 2, [slice(p.start, p.stop) for p in rows], p=1 - rate,
                                    spec=placed, device=q.device)  # fmt: skip
            keep = keep.flatten(1, -3)
            if keep.shape != (batch, heads, sum(p.length for p in rows), split.size):
                raise fail(f"{verb}: the weights of these heads are not this rank's part of spec and shape",
                           spec=spec, shape=list(shape), heads=heads, fix="of the global weights")  # fmt: skip
            kept = keep.narrow(1, *own_range(verb, heads, inner))
            drop = lambda weights: torch.where(kept, weights / (1 - rate), 0)  # noqa: E731
        out, _ = plain(q, k, v, False, rule.mask(_Block(rows, columns, "mask"), numbers, q), scale, drop)
    # 3. Exchange back.
    if inner:
        places = {p.start: p for p in groups[me]}
        by_rank = [places[p.start] for p in split.pieces(*members[me])]
        out = all_to_all(take(out, by_rank, 2), inner, split=2, concat=1, size=heads)
    return out


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
        for i, blocks in enumerate(self.steps):
            wait = self.start(i, [k, v])
            for b in blocks:
                mask = self.rule.mask(b, numbers, q)
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
        self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor,
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
                                       out[:, :, rows], lse[:, :, rows], self.rule.mask(b, numbers, q),
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
    return (lse - total.masked_fill(total == -math.inf, 0)).exp().unsqueeze(-1)

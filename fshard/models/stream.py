"""What the transformers share: how their residual stream lies on a mesh, and the walk through their blocks.

Legend: B batch, T time, D width, H heads, K head width, R its turned dims; [B@data] is a dim split over an axis; {V}
varies over it, {I} does not.
Source: Shoeybi et al., 2019, and Korthikanti et al., 2022, "Reducing activation recomputation", for the splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard import nn, tree
from fshard._comm import Axis, live_axes, region
from fshard._ops import Gather, Vary
from fshard.collectives import all_gather, pmax, pslice, psum, psum_scatter, pvary
from fshard.nn import rope
from fshard.random import fold_in
from fshard.schedule.overlap import apply_then_compute
from fshard.schedule.scan import scan
from fshard.schedule.unshard import unshard
from fshard.spec import P, any_on_host, names_of

from .decoding import Cache, Seen, Tokens, generate, recall, rows

# A block: its whole parameters, x [B, T, D], its key and what it has seen -> x and what it has seen by now.
Block = Callable[[Any, Tensor, Tensor | None, Seen | None], tuple[Tensor, Seen | None]]


@dataclass(frozen=True)
class Layout:
    """The mesh axes each part is split over; `None` leaves it whole.

    `data`: the batch. `model`: heads, hidden units and the vocabulary. `sequence`: also split the residual stream
    along time over `model`, between the blocks' halves. `batch`: how many examples all ranks have, needed only with
    dropout in a compiled program that has an uneven dim anywhere; elsewhere the ranks tell each other. `dtype`: in
    which parameters move and compute, and `reduce_dtype`: in which their gradients are summed over `data`, if not in
    those they are kept in.

    >>> Layout("data", "model", sequence=True).stream
    P('data', 'model')
    """

    data: Axis = None
    model: Axis = None
    sequence: bool = False
    batch: int | None = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def stream(self) -> P:
        """The spec of the residual stream, [B, T, D]."""
        return P(self.data, self.model if self.sequence else None)

    def whole(self, names: Sequence[str], params: Any, specs: Any, shapes: Any) -> dict[str, Any]:
        """Parameters ready for each rank's own batch: unsharded over `data` by their specs, or varied without."""
        own = {name: params[name] for name in names}
        given = P() if specs is None else {name: specs[name] for name in names}
        if not self.data and not any_on_host(given):  # which needs no region
            return own if self.dtype is None else tree.map(lambda x: x.to(self.dtype), own)
        out: dict[str, Any] = unshard(own, given, self.data, shapes={name: shapes[name] for name in names},
                                      dtype=self.dtype, reduce_dtype=self.reduce_dtype)  # fmt: skip
        return out

    def shared(self, params: Any) -> Any:
        """Replicated parameters of the stream: under sequence parallelism each rank uses them on its own part."""
        return pvary(params, self.model) if self.sequence else params

    def enter(self, x: Tensor, t: int) -> Tensor:
        """From the stream into a part split over model: [B, T, D]{I}, or [B, T@model, D], -> [B, T, D]{V model}."""
        out: Tensor = all_gather(x, self.model, 1, size=t) if self.sequence else pvary(x, self.model)
        return out

    def linear(self, x: Tensor, t: int, w: Tensor, b: Tensor | None = None) -> Tensor:
        """From the stream into a part split over model, by its first layer: x @ w [D, F@model] + b [F@model].

        In backward the sum of x's gradient over model is under way while those of w and b are computed.
        """
        axes = () if self.model is None else live_axes(region("linear").comm, names_of(self.model))
        if not axes:
            return nn.linear(x, w, b)
        comm = region("linear").comm
        way = Gather(comm, axes, ((1, t),)) if self.sequence else Vary(comm, axes)
        return apply_then_compute(way, nn.linear, x, w, *([] if b is None else [b]))

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' partial results, [B, T, D]{V model}, back in the stream."""
        out: Tensor = psum_scatter(x, self.model, 1) if self.sequence else psum(x, self.model)
        return out

    def project(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """From a part split over model back into the stream: x [B, T, F@model] @ w [F@model, D] + b [D]."""
        if not self.model:
            return nn.linear(x, w, b)  # one operation
        out = self.leave(nn.linear(x, w))
        return out if b is None else out + self.shared(b)

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """What is the same over model, such as positions, as the stream holds it: its part of time, or all."""
        out: Tensor = pslice(x, self.model, dim) if self.sequence else x
        return out

    def tokens(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        """Embed ids [B, T] by a table [V@model, D]: the stream. `size` is V."""
        return self.leave(nn.embedding(ids, table, axis=self.model, size=size))

    def counted(self, ids: Tensor, key: Tensor | None, *rates: float) -> Layout:
        """With the `batch` of which this rank has ids [B, T], where dropout at one of these rates needs it."""
        return self if key is None or not any(rates) else replace(self, batch=self.across(ids.shape)[0])

    def across(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape whose dim 0 is this rank's batch, as a global one."""
        batch = self.batch
        if batch is None:
            batch = rows("dropout", shape[0], self.data, word="Layout(batch=)")
        return (batch, *shape[1:])

    def dropout(self, x: Tensor, rate: float, key: Tensor | None, name: str, t: int) -> Tensor:
        """`nn.dropout` of the stream by the key of this name; `t` is the global T."""
        if not rate or key is None:
            return x
        return nn.dropout(x, rate, key=fold_in(key, name), spec=self.stream, shape=self.across((len(x), t, x.shape[2])))


ONE_DEVICE = Layout()


def sub(key: Tensor | None, name: str | int) -> Tensor | None:
    """`fold_in`, where there is a key."""
    return None if key is None else fold_in(key, name)


def angles(
    parameters: Mapping[str, Any], width: int, longest: int, *, tokens: Tokens, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The cos and sin to turn queries and keys by: each [T, R/2], or [B, T, R/2] with a mask; see `rope.frequencies`.

    Where they depend on the length of the sequence, that is the longest one's so far, of all ranks.
    """
    length: int | Tensor | None = None
    if parameters.get("rope_type") in ("dynamic", "longrope"):
        length = tokens.start + tokens.t
        if tokens.mask is not None:
            ends = tokens.positions + 1
            length = pmax(ends.max() if ends.numel() else ends.new_zeros(()), layout.data)  # a rank may have none
    rates, factor = rope.frequencies(parameters, width, longest, length=length, device=tokens.positions.device)
    return rope.angles(tokens.positions, rates, factor, dtype=dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, seen: Seen | None, *, layout: Layout, rate: float = 0.0,
    key: Tensor | None = None, heads: int, group: int = 1, scale: float | None = None,
) -> tuple[Tensor, Seen | None]:  # fmt: skip
    """Causal attention, with what was seen before: q [B, H@model, T, K] -> [B, T, HK@model], and what is seen now.

    k and v may have fewer heads, each for a `group` of neighbouring ones of q, which are on its rank. `heads` is H, for
    the dropout of weights by `key`.
    """
    k, v, seen = recall(k, v, tokens, seen)
    mask, shape = tokens.mask, [heads]
    if group > 1 and rate and key is not None:  # groups are what is split, and so are their weights to be
        q, k, v = q.unflatten(1, (k.shape[1], group)), k.unsqueeze(2), v.unsqueeze(2)  # type: ignore[no-untyped-call]
        mask, shape = None if mask is None else mask.unsqueeze(1), [heads // group, group]
    weights = layout.across((len(q), *shape, tokens.t, k.shape[-2])) if rate and key is not None else None
    a = nn.attention(q, k, v, causal=mask is None, mask=mask, scale=scale, rate=rate,
                     key=sub(key, "attn"), spec=P(layout.data, layout.model), shape=weights)  # fmt: skip
    return a.flatten(1, -3).transpose(1, 2).flatten(2), seen


def through(
    block: Block, params: Sequence[Any], x: Tensor, *, layout: Layout, shapes: Sequence[Any], specs: Any = None,
    key: Tensor | None = None, remat: bool = False, cache: Cache | None = None,
) -> tuple[Tensor, list[Seen]]:  # fmt: skip
    """x through the blocks, each unsharded just before its use: (x, what each has seen by now, for a cache).

    `remat` recomputes each block in backward. With a `cache` every block is given what it saw.
    """

    def one(p: Any, x: Tensor, own: tuple[Tensor | None, Seen | None]) -> Any:
        out = block(p, x, *own)
        return out[0] if cache is None else out

    past = cache.blocks if cache is not None and cache.blocks else [None] * len(params)
    own = [(sub(key, i), past[i]) for i in range(len(params))]
    found = scan(one, params, x, specs=specs, axis=layout.data, each=own, shapes=shapes, remat=remat,
                 has_aux=cache is not None, dtype=layout.dtype, reduce_dtype=layout.reduce_dtype)  # fmt: skip
    return (found, []) if cache is None else found


def decode(
    apply: Callable[..., Any], cfg: Any, params: Any, ids: Tensor, *, layout: Layout, specs: Any = None, **how: Any
) -> Tensor:
    """`decoding.generate` by a model's `apply`, which is given a cache; `how` is for the former."""
    layout = replace(layout, sequence=False)  # one token has no sequence to split

    def step(ids: Tensor, mask: Tensor | None, cache: Cache) -> Any:
        return apply(cfg, params, ids, layout=layout, specs=specs, mask=mask, cache=cache)

    return generate(step, ids, size=cfg.vocab_size, data=layout.data, model=layout.model, **how)


__all__ = ["ONE_DEVICE", "Block", "Layout", "angles", "attend", "decode", "sub", "through"]

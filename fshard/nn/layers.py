"""Pure layers and losses: sharded over a mesh axis with `axis=`, dense without.

Legend: B batch, T time, S keys, D width, F hidden width, H heads, K head width, V vocabulary; [D@model] is a
dim split over an axis; {V} varies over it, {I} does not. Matrices are stored `[in, out]` and used as `x @ w`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import random
from fshard._core.microbatch import flattened_rows
from fshard._core.ops import global_shape, local_range
from fshard._core.region import axes_of_own_values, live_axis
from fshard._core.weight import Weight
from fshard.collectives import all_gather, psum, psum_scatter, pvary
from fshard.errors import checked, fail
from fshard.random.draws import bernoulli_pieces
from fshard.spec import Axis, P, Size, describe, names_of

from .sampled_classes import check_range
from .zigzag import local_ranges


@checked
def linear(
    x: Tensor, w: Tensor | Weight, b: Tensor | None = None, *, axis: Axis = None,
    split: Literal["column", "row"] = "column", out: Literal["split", "whole"] | None = None, size: Size | None = None,
) -> Tensor:  # fmt: skip
    """Compute x @ w + b: x [..., D], w [D, F], b [F] -> [..., F]. With `axis`, w has split columns, or split rows.

        columns: x [..., D]{I}, w [D, F@axis], b [F@axis]       -> [..., F@axis]{V}; out="whole": [..., F]{I}
                 cost: none, or an all_gather of the result; backward, a psum of x's gradient
        rows:    x [..., D@axis]{V}, w [D@axis, F], b [F]{I}    -> [..., F]{I}; out="split": b and result [..., F@axis]
                 cost: a psum of the result, or a psum_scatter; backward, none, or an all_gather

    `column_linear` and `row_linear` put the same two layers in the place of modules.

    Args:
        w: a table of classes [C@axis, D] is used as `w.mT`.
        axis: without it nothing moves, and x and w may be parts: x {V} @ w [D, F@model].
        split: what `axis` splits of w.
        out: without it columns stay split, and rows are summed.
        size: F, needed only by columns with out="whole" in a compiled program, where the axis does not divide it.

    >>> h = nn.linear(x, params["up"], axis="model")                                  # [B, F@model]
    >>> y = nn.linear(torch.relu(h), params["down"], axis="model", split="row")       # [B, D]

    Raises ShardingError for shapes that do not fit.

    Source: Shoeybi et al., 2019, "Megatron-LM".
    """
    if isinstance(w, Tensor) and w.ndim != 2:
        raise fail(f"linear: w is {list(w.shape)}", fix="[D, F]; a table of classes [C, D] is used as w.mT")
    if not axis:
        return _linear(w, x, b)
    if x.ndim and x.shape[-1] != w.shape[0]:
        parts = "[..., D@axis], w [D@axis, F]" if split == "row" else "[..., D], w [D, F@axis]"
        hint = "; fs.pslice(x, axis, -1) is the part of a whole x" if split == "row" else ""
        hint += "; a table of classes [C, D] is used as w.mT" if x.shape[-1] == w.shape[1] else ""
        raise fail(f"linear: x has {x.shape[-1]} inputs and w has {w.shape[0]}", x=list(x.shape), w=list(w.shape),
                   fix=f"split={split!r} takes x {parts}{hint}")  # fmt: skip
    if b is not None and b.shape != w.shape[1:] and not (split == "row" and out == "split"):
        taken = "b [F@axis], split as w" if split == "column" else "b [F], unsplit"
        raise fail(f"linear: w has {w.shape[1]} outputs and b is {list(b.shape)}", fix=f"split={split!r} takes {taken}")
    product = functools.partial(_linear, w)
    if split == "row":
        return row_product(product, x, b, axis, out=out)
    _check_unsplit("linear", "x", x, axis)
    return column_product(product, x, b, axis, out=out, size=size)


Product = Callable[[Tensor, Tensor | None], Tensor]  # (x, b) -> x @ w + b, with this rank's part of w


def column_product(
    product: Product, x: Tensor, b: Tensor | None, axis: Axis, *, out: str | None, size: Size | None
) -> Tensor:
    """Multiply by split columns: x [..., D]{I}, b [F@axis] -> [..., F@axis]{V}, or [..., F]{I} for out="whole"."""
    y = product(pvary(x, axis), b)
    return all_gather(y, axis, -1, size=size, to="invariant") if out == "whole" else y


def row_product(product: Product, x: Tensor, b: Tensor | None, axis: Axis, *, out: str | None) -> Tensor:
    """Multiply by split rows: x [..., D@axis]{V}, b [F]{I} -> [..., F]{I}, or [..., F@axis]{V} for out="split"."""
    y = product(x, None)
    return add_bias(psum_scatter(y, axis, -1) if out == "split" else psum(y, axis), b)


def _check_unsplit(verb: str, name: str, x: Tensor, axis: Axis) -> None:
    """Raise ShardingError for rows that an axis splits, over which the weight is split too."""
    if varying := sorted(axes_of_own_values(x) & set(names_of(axis))):
        raise fail(f"{verb}: the ranks over {varying[0]!r} have different {name} and different parts of the weight",
                   f"their results would be joined as if {name} were the same",
                   fix=f"another axis for one of them, or {name} = fs.all_gather({name}, {varying[0]!r}, "
                       "to='invariant')")  # fmt: skip


def add_bias(y: Tensor, b: Tensor | None) -> Tensor:
    return y if b is None else y + b.to(y.dtype)  # torch.autocast makes y half precision


def _linear(w: Tensor | Weight, x: Tensor, b: Tensor | None) -> Tensor:
    return w.linear(x, b) if isinstance(w, Weight) else F.linear(x, w.transpose(0, 1), b)


@checked
def mlp(
    x: Tensor, up: Tensor, down: Tensor, *, up_b: Tensor | None = None, down_b: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = F.relu, axis: Axis = None,
) -> Tensor:  # fmt: skip
    """Compute down(activation(up(x))): [..., D] -> [..., D].

        x {I}, up [D, F@axis], up_b [F@axis], down [F@axis, D], down_b [D]{I} -> {I}
        one psum forward, one backward

    Source: Shoeybi et al., 2019, "Megatron-LM".

    >>> y = nn.mlp(x, params["up"], params["down"], activation=nn.gelu, axis="model")
    """
    _check_unsplit("mlp", "x", x, axis)
    if not axis:
        return add_bias(_linear(down, activation(_linear(up, x, up_b)), None), down_b)
    h = activation(column_product(functools.partial(_linear, up), x, up_b, axis, out="split", size=None))
    return row_product(functools.partial(_linear, down), h, down_b, axis, out="whole")


@checked
def embedding(
    ids: Tensor, table: Tensor | Weight, *, axis: Axis = None, size: Size | None = None,
    split: Literal["row", "column"] = "row", out: Literal["partial", "split", "whole"] | None = None,
    padding_idx: int | None = None, max_norm: float | None = None,
) -> Tensor:  # fmt: skip
    """Look up rows of a table: ids [...], table [V, D] -> [..., D].

        rows:    ids {I}, table [V@axis, D]{V} -> [..., D]{V}, zero where another rank has the row, to be summed;
                 out="whole": [..., D]{I} by a psum; out="split": [..., D@axis]{V} by a psum_scatter
        columns: ids {I}, table [V, D@axis]{V} -> [..., D@axis]{V}; out="whole": [..., D]{I} by an all_gather

    The gradient of the table needs no communication beyond the transpose of those.

    Args:
        size: V of a split by rows, D of a split by columns; needed only where the axis does not divide it.
        out: without it nothing moves: "partial" of rows, "split" of columns.
        padding_idx: the row that gets no gradient, from the end if negative, as in torch; its tangent is 0, too.
        max_norm: refused: torch's writes shorter rows into the table in forward.

    An id outside the table is an error on a CPU. Elsewhere, in a compiled program and under vmap it gives NaN with
    `axis` over rows (to raise, the host would have to wait for the device), and torch's error without.

    >>> x = fs.psum(nn.embedding(ids, params["wte"], axis="model", size=50257), "model")
    """
    if table.ndim != 2:
        raise fail(f"embedding: table is {list(table.shape)}", fix="[V, D]")
    if max_norm is not None:
        raise fail(f"embedding: max_norm={max_norm}", "torch's writes shorter rows into the table in forward",
                   fix="table * (max_norm / table.norm(dim=1, keepdim=True)).clamp(max=1) after a step")  # fmt: skip
    if out == "partial" and split == "column":
        raise fail(
            "embedding: out='partial' of split='column'", fix="out='split' or 'whole': no rank has a partial sum"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise fail(f"embedding: ids are {describe(ids)}", fix="integer ids [...]")
    ids = ids.long()  # bytes could not be compared with the size of the table
    _check_unsplit("embedding", "ids", ids, axis)
    over = axis if split == "row" else None
    v = size if over else None
    if padding_idx is not None:
        n = local_range("embedding", table.shape[0], over, v)[1]
        if not -n <= padding_idx < n:
            raise fail(f"embedding: padding_idx={padding_idx}, and the table has {n} rows",
                       fix=f"{-n} <= padding_idx < {n}")  # fmt: skip
        padding_idx %= n
    if (embed := getattr(table, "embed", None)) is not None:  # of a Weight, or of its stand-in in a deferred module
        rows: Tensor = embed(ids, axis=over, size=v, padding_idx=padding_idx)
    else:
        rows = _lookup(ids, cast("Tensor", table), over, v)
        if padding_idx is not None:
            rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    if not axis or out is None or out == "partial":
        return rows
    if split == "column":
        return all_gather(rows, axis, -1, size=size, to="invariant") if out == "whole" else rows
    return psum_scatter(rows, axis, -1) if out == "split" else psum(rows, axis)


def _lookup(ids: Tensor, table: Tensor, axis: Axis, size: Size | None) -> Tensor:
    """Look up rows of a table [V@axis, D]: zero where another rank has the row, NaN where no rank has it."""
    n = table.shape[0]
    start, end = local_range("embedding", n, axis, size)
    in_range = check_range("embedding", "id", ids, end, kind="rows of table")
    if not axis or (in_range and not live_axis("embedding", axis)):
        return F.embedding(ids, table)
    local = ids - start
    is_local = (local >= 0) & (local < n)
    rows = F.embedding(local.where(is_local, 0), table if n else F.pad(table, (0, 0, 0, 1)))
    otherwise = torch.where((ids >= 0) & (ids < end), 0.0, math.nan).to(rows.dtype)
    return torch.where(is_local.unsqueeze(-1), rows, otherwise.unsqueeze(-1))


@checked
def layer_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * w + b over the last dim: [..., D] -> [..., D].

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2))
    tensor([[-1.0000,  1.0000]])

    Source: Ba et al., 2016.
    """
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


@checked
def rms_norm(x: Tensor, w: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * w over the last dim, in float32 or better: [..., D] -> [..., D].

    Half precision is rounded once, after the product with `w`; Llama's code rounds before it too.
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2))
    tensor([[0.8485, 1.1314]])

    Source: Zhang & Sennrich, 2019.
    """
    return F.rms_norm(x, x.shape[-1:], w, eps)


@checked
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None,
    scale: float | None = None, rate: float = 0.0, key: Tensor | None = None, spec: P | None = None,
    shape: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention: q [B, H, T, K], k and v [B, H, S, K] -> [B, H, T, K].

    k and v may have fewer heads than q, a divisor of H: each head of k and v serves a group of neighbouring heads of q.
    With `causal` the T positions are the last of the S, and each attends to those up to itself; where an axis splits T
    but not S, pass a `mask` instead. `mask` [..., T, S] is True where a query attends to a position, or a number to add
    to the score; a query that attends to no position gets 0. With a dropout `rate` and a `key` every mesh drops the
    same weights: `spec` and `shape` describe the global weights, [B, H, T, S], as in `dropout`. Heads may be split
    over an axis, without communication.

    Without dropout this is torch's fused kernel. On a CPU the kernel has neither jvp nor second derivatives; torch's
    plain formula has both: `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`. Source: Vaswani et al., 2017.

    >>> nn.attention(q, k, v, causal=True, rate=0.1, key=key, spec=P("data", "model"))

    Raises ShardingError for shapes that do not fit, and for a mask with `causal=True`.
    """
    if causal and mask is not None:
        raise fail("attention: causal=True and a mask", fix="combine the mask with nn.causal_mask(T, S)")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim < 3:
            raise fail(f"attention: {name} is {list(x.shape)}", fix="[B, heads, positions, K]; B may be left out")
    t, s, drops = q.shape[-2], k.shape[-2], has_dropout("attention", rate, key)
    k, v = (repeat_heads(q.shape[-3], x) for x in (k, v))
    if causal and t > 1 and (drops or t != s):
        mask = causal_mask(t, s, device=q.device)
    if not drops:
        square = causal and t == s and t > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, scale=scale)
    scores, masked = masked_scores(q, k, mask, q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    if masked is not None:
        weights = weights.masked_fill(masked, 0)
    return dropout(weights, rate, key=key, spec=spec, shape=shape) @ v


def masked_scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return scores [B, H, T, S], and the queries [B, H, T, 1] that attend to no position, whose scores are 0."""
    scores = q * scale @ k.transpose(-2, -1)
    if mask is None:
        return scores, None
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    masked = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(masked, 0), masked


def repeat_heads(heads: int, x: Tensor) -> Tensor:
    """Repeat each of G heads H/G times: [B, G, S, K] -> [B, H, S, K]."""
    groups = x.shape[-3]
    check_groups("attention", heads, groups)
    return x if groups == heads else x.repeat_interleave(heads // groups, dim=-3)


def check_groups(verb: str, heads: int, groups: int) -> None:
    """Raise ShardingError unless the groups divide the heads of queries."""
    if groups != heads and (not groups or heads % groups):
        why = f"{heads} % {groups} = {heads % groups}" if groups else "there are none"
        raise fail(f"{verb}: the heads of k and v must divide those of q", why, q=heads, k=groups)


@checked
def causal_mask(t: int, s: int, *, device: torch.device | None = None) -> Tensor:
    """Make a bool mask [T, S]: True where one of the last T of S positions may attend to a position.

    >>> causal_mask(2, 3)
    tensor([[ True,  True, False],
            [ True,  True,  True]])

    Raises ShardingError for sizes below 0.
    """
    if min(t, s) < 0:
        raise fail(f"causal_mask: t={t}, s={s}", fix="both are 0 or more")
    return torch.ones(t, s, dtype=torch.bool, device=device).tril(s - t)


@checked
def dropout(
    x: Tensor, rate: float, *, key: Tensor | None, spec: P | None = None, shape: tuple[int, ...] | None = None,
    zigzag: Axis = None,
) -> Tensor:  # fmt: skip
    """Zero a share `rate` of the elements and scale the rest by 1 / (1 - rate).

    The mask is a function of `key` and of each element's global index, hence the same on every mesh, and the
    same when recomputed. `spec` is the spec of the global array, whose axes `x` varies over; `shape` is the
    global shape, needed only where an axis does not divide it. `rate` 0 or key `None` returns `x`. `zigzag` is the axis
    over which a dim is in the zigzag order (`to_zigzag`), the first of that dim in `spec`.
    Raises ShardingError if x is not this rank's part of the global array.

    Source: Srivastava et al., 2014.

    >>> nn.dropout(x, 0.1, key=fs.fold_in(key, layer), spec=P("data"))        # x [B@data, T, D]
    """
    if not has_dropout("dropout", rate, key):
        return x
    assert key is not None
    spec = spec or P()
    if shape is None:
        shape = global_shape("dropout", x, spec, word="shape=") if spec.axes else tuple(x.shape)
    with flattened_rows():
        if names_of(zigzag):
            dim, ranges = local_ranges("dropout", shape, spec, zigzag)
            keep = bernoulli_pieces(key, shape, dim, ranges, p=1 - rate, spec=spec, device=x.device)
        else:
            keep = random.bernoulli(key, shape, p=1 - rate, spec=spec, device=x.device)
    if keep.shape != x.shape:
        raise fail("dropout: x is not this rank's part of the global array", fix="pass the global shape=",
                   shape=list(shape), spec=spec, part=list(keep.shape), x=list(x.shape))  # fmt: skip
    return torch.where(keep, x / (1 - rate), 0)


@checked
def gelu(x: Tensor) -> Tensor:
    """Compute the tanh form of GELU, as GPT-2 does: [...] -> [...]. Source: Hendrycks & Gimpel, 2016.

    >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    return F.gelu(x, approximate="tanh")


def has_dropout(verb: str, rate: float, key: Tensor | None) -> bool:
    if not 0 <= rate < 1:
        raise fail(f"{verb}: rate={rate}", fix="0 <= rate < 1")
    return rate > 0 and key is not None

"""Shared code of the transformers: the layout of their residual stream, attention, and the loop over blocks.

Legend: B batch, T time, D width, H heads, K head width, R rotated dims of a head; [B@data] is a dim split over an
axis; {V} varies over it, {I} does not.
Source: Shoeybi et al., 2019, and Korthikanti et al., 2022, "Reducing activation recomputation", for the splits.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import nn, tree
from fshard._core.ops import Gather, Vary
from fshard._core.region import live_axis, region
from fshard._core.weight import Weight, is_weight
from fshard.collectives import all_gather, pmax, pslice, psum, psum_scatter, pvary
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.nn import decoding, rope
from fshard.nn.decoding import Decoder, Options, global_batch
from fshard.nn.decoding.options import with_tokens
from fshard.random import fold_in
from fshard.schedule.options import BackwardPrefetch, Release
from fshard.schedule.overlap import apply_then_compute
from fshard.schedule.scan import scan
from fshard.schedule.unshard import make_whole, unshard
from fshard.spec import Axis, P, any_on_host, is_spec, names_of

from .activations import activation_errors
from .kv_cache import Cache, KeyValues, Tokens, append_to_cache

# A block: its unsharded parameters, x, its key, its cached keys and values[, its own argument] -> x and the
# updated keys and values.
Block = Callable[..., tuple[Any, Any]]


class _Parts(dict[str, Any]):
    """Parameters that are whole over an axis; those that it does not have are gathered at each access."""

    def __init__(self, whole: dict[str, Any], gather: Callable[[Sequence[str]], dict[str, Any]]) -> None:
        super().__init__(whole)
        self._gather = gather

    def __missing__(self, name: str) -> Any:
        return self._gather([name])[name]


@checked
@dataclass(frozen=True)
class Layout:
    """The mesh axes each part is split over; `None` leaves it whole.

    `data`: the batch. `model`: heads, hidden units and the vocabulary. `sequence`: also split the residual stream
    along time over `model`, between the blocks' halves. `batch`: the number of examples on all ranks, needed only with
    dropout in a compiled program that has an uneven dim anywhere; elsewhere the ranks exchange it. `dtype`: the dtype
    parameters are gathered and computed with, and `reduce_dtype`: the dtype their gradients are summed over `data`
    with; by default the dtype they are stored in. `experts`: the experts of a mixture, by expert; see `mixtral.specs`.
    `release`, `prefetch` and `backward_prefetch`: when the blocks' parameters are gathered and freed; see `scan`.
    `varied`: the parameters are whole over `data` and vary over it already, as `fs.pvary(params, "data")` before
    `value_and_grad`, so that each rank has the gradients of its own examples, which `optim.zero` takes.
    `context`: the positions, of ids, targets and results in their order; between them decoders have the zigzag order
    (`nn.context_attention`). With `zigzag` the ids, targets and results are in it, too. Without caches. `stage`: the
    blocks, by block (`fs.on_stages`), for `models.pipelined`.

    >>> Layout("data", "model", sequence=True).stream
    P('data', 'model')
    """

    data: Axis = None
    model: Axis = None
    sequence: bool = False
    batch: int | None = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    experts: Axis = None
    release: Release = True
    prefetch: int = 1
    backward_prefetch: BackwardPrefetch = None
    varied: bool = False
    context: Axis = None
    zigzag: bool = False
    stage: Axis = None

    @property
    def examples(self) -> tuple[str, ...]:
        """The axes that split the tokens of a batch: over their ranks a loss is the mean of all targets."""
        return (*names_of(self.data), *names_of(self.context))

    def unsharded(self, specs: Any) -> Axis:
        """Return the axes over which parameters of these specs are made whole, and their gradients summed."""
        split = {a for s in tree.leaves(specs) for a in s.axes} & {*names_of(self.data)} if self.varied else ()
        if split:
            raise fail(f"Layout(varied=True): parameters are split over {', '.join(sorted(split))}", layout=self,
                       fix="varied=False: unshard gathers them, and sums their gradients")  # fmt: skip
        return None if self.varied else self.examples or None

    @property
    def stream(self) -> P:
        """The spec of the residual stream, [B, T, D]."""
        return P(self.data, (*names_of(self.context), *names_of(self.model if self.sequence else None)) or None)

    def unshard(self, names: Sequence[str], params: Any, specs: Any, described: Any) -> dict[str, Any]:
        """Make the named parameters ready for each rank's own batch: unshard them over `data`, by their specs.

        In one transfer, but for frozen parts of a model with a head of its own: those are gathered when they are used,
        so that the table of embeddings is freed before the blocks run. One that is the head, too, is used at the end
        again, when the memory in use is largest.
        """
        if not isinstance(params, Mapping):
            raise must_be("params", "a dict", params, fix="the tree of init, or of load")
        parts = {name: params[name] for name in names if name in params}
        wanted = {name: described[name] for name in names}
        check_params(parts, wanted)
        part_specs = {name: P() if specs is None else spec_of(specs, name) for name in names}
        axis = self.unsharded(part_specs)
        if not axis and not any_on_host(part_specs):  # without a collective, so also outside a region
            on_one_device: dict[str, Any] = make_whole(parts, part_specs, axis, dtype=self.dtype)
            return on_one_device

        def gather(names: Sequence[str]) -> dict[str, Any]:
            some, some_specs, shapes = ({name: of[name] for name in names} for of in (parts, part_specs, wanted))
            out: dict[str, Any] = unshard(some, some_specs, axis, shapes=shapes, dtype=self.dtype,
                                          reduce_dtype=self.reduce_dtype)  # fmt: skip
            return out

        apart = "head" in parts and torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling()
        frozen = [name for name in names if apart and not any(x.requires_grad for x in tree.leaves(parts[name]))]
        return _Parts(gather([name for name in names if name not in frozen]), gather)

    def replicated(self, params: Any) -> Any:
        """Return replicated parameters as the stream uses them: varying over `model` if ranks have parts of time."""
        return pvary(params, self.model) if self.sequence else params

    def enter(self, x: Tensor, t: int) -> Tensor:
        """Enter a model-parallel region: stream [B, T, D]{I model}, or [B, T@model, D], -> [B, T, D]{V model}."""
        return all_gather(x, self.model, 1, size=t) if self.sequence else pvary(x, self.model)

    def leave(self, x: Tensor) -> Tensor:
        """Leave a model-parallel region by summing its partial results [B, T, D]{V model} into the stream."""
        return psum_scatter(x, self.model, 1) if self.sequence else psum(x, self.model)

    def column_linear(self, x: Tensor, t: int, w: Tensor | Weight, b: Tensor | None = None) -> Tensor:
        """Enter a model-parallel region by its first layer: stream x @ w [D, F@model] + b [F@model] -> [B, T, F@model].

        In backward, the sum of x's gradient over `model` overlaps with computing the gradients of w and b.
        """
        axes = names_of(live_axis("linear", self.model))
        if not axes:
            return nn.linear(x, w, b)
        comm = region("linear").comm
        collective = Gather(comm, axes, ((1, t),)) if self.sequence else Vary(comm, axes)
        return apply_then_compute(collective, nn.linear, x, w, b)

    def row_linear(self, x: Tensor, w: Tensor | Weight, b: Tensor | None = None) -> Tensor:
        """Leave a model-parallel region by its last layer: x [B, T, F@model] @ w [F@model, D] + b [D] -> stream."""
        if not live_axis("linear", self.model):
            return nn.linear(x, w, b)  # one operation
        out = self.leave(nn.linear(x, w))
        return out if b is None else out + self.replicated(b)

    def whole(self, x: Tensor, t: int) -> Tensor:
        """Return the stream without a split along time: [B, T@model, D] -> [B, T, D]{I model}."""
        return all_gather(x, self.model, 1, size=t, to="invariant") if self.sequence else x

    def layer_norm(self, x: Tensor, p: Any, eps: float) -> Tensor:
        """Compute the layer norm of the stream, or of this rank's part of it."""
        p = self.replicated(p)
        return nn.layer_norm(x, p["w"], p["b"], eps=eps)

    def time_slice(self, x: Tensor, dim: int = 1) -> Tensor:
        """Slice a value that is the same over `model`, such as positions, as the stream is split along time."""
        return pslice(x, self.model, dim) if self.sequence else x

    def embed(self, ids: Tensor, table: Tensor | Weight, size: int) -> Tensor:
        """Embed ids [B, T] by a table [V@model, D] into the stream; `size` is V."""
        return self.leave(nn.embedding(ids, table, axis=self.model, size=size))

    def with_batch(self, ids: Tensor, key: Tensor | None, *rates: float) -> Layout:
        """Return the layout with `batch` set, if dropout at one of the rates needs it; ids [B, T] are this rank's."""
        if key is None or not any(rates):
            return self
        return replace(self, batch=self.global_shape(ids.shape)[0])

    def to_zigzag(self, *xs: Any) -> tuple[Any, ...]:
        """Return the layout of a region whose tokens are in the zigzag order, and tokens [B, T@context], moved to it.

        Some may be None, and all may be in it.
        """
        if not self.context or self.zigzag:
            return self, *xs
        return replace(self, zigzag=True), *[None if x is None else nn.to_zigzag(x, self.context) for x in xs]

    def from_zigzag(self, x: Tensor) -> Tensor:
        """Move a result [B, T@context, ..] back to the order of the tokens."""
        return nn.from_zigzag(x, self.context) if self.context and not self.zigzag else x

    def refuse_context(self, what: str) -> None:
        """Raise ShardingError if an axis splits the positions, which a part of a model cannot have."""
        if self.context:
            raise fail(f"{what}: has no form for positions that an axis splits", layout=self,
                       fix="a Layout without context")  # fmt: skip

    def refuse_zigzag(self, what: str) -> None:
        """Raise ShardingError if the tokens of an encoder are in the zigzag order."""
        if self.zigzag:
            raise fail(f"{what}: its tokens have no zigzag order, in which no rank would have less work", layout=self,
                       fix="a Layout without zigzag")  # fmt: skip

    def global_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the global shape of a shape whose dim 0 is this rank's batch."""
        batch = self.batch
        if batch is None:
            batch = global_batch("dropout", shape[0], self.data, word="Layout(batch=)")
        return (batch, *shape[1:])

    def weight_dropout(
        self, rate: float, key: Tensor | None, shape: Sequence[int], name: str = "attn", rows: Axis = None
    ) -> dict[str, Any]:
        """Return options of attention to drop weights [B, H@model, T@rows, S], of this global shape but for B."""
        drops = rate and key is not None
        return {"rate": rate, "key": fold_name(key, name), "spec": P(self.data, self.model, rows),
                "shape": self.global_shape(shape) if drops else None}  # fmt: skip

    def dropout(self, x: Tensor, rate: float, key: Tensor | None, name: str, t: int) -> Tensor:
        """Run `nn.dropout` of the stream by `key` folded with `name`; `t` is the global T."""
        if not rate or key is None:
            return x
        shape = self.global_shape((len(x), t, x.shape[2]))
        return nn.dropout(x, rate, key=fold_in(key, name), spec=self.stream, shape=shape,
                          zigzag=self.context if self.zigzag else None)  # fmt: skip


ONE_DEVICE = Layout()


def check_numbers(verb: str, cfg: Any, *, own: Sequence[str] = ()) -> None:
    """Raise ShardingError, listing each number of a config that is out of range; `own` fields have their own rules.

    Sizes are 1 or more (of layers there may be none), tokens 0 or more, rates of dropout less than 1, other numbers
    finite.
    """
    errors = []
    for name, kind, n in [(f.name, str(f.type), getattr(cfg, f.name)) for f in fields(cfg) if f.name not in own]:
        is_size, is_rate = kind.startswith("int"), "drop" in name
        least = 1 if is_size and not any(word in name for word in ("layer", "dense", "_token_id")) else 0
        most = 1 if is_rate else 2**31 if is_size else math.inf
        numbers = [x for x in (n if isinstance(n, tuple) else (n,)) if isinstance(x, (int, float))]
        if not isinstance(n, bool) and not all(least <= x < most for x in numbers):
            below = f", less than {most}" * (is_rate or n >= most)
            errors.append(fail(f"{verb}: {name}={n}", fix=f"{least} or more{below}"))
    raise_all(errors)


def config_errors(
    verb: str, cfg: Any, width: str = "hidden_size", heads: str = "num_attention_heads", activation: str = "hidden_act",
    *, own: Sequence[str] = (),
) -> list[ShardingError]:  # fmt: skip
    """Check the numbers of a config; return the errors of the fields of these names."""
    check_numbers(verb, cfg, own=own)
    d, h = getattr(cfg, width), getattr(cfg, heads)
    uneven = fail(f"{verb}: the heads must divide the width", f"{d} % {h} = {d % h}", **{width: d, heads: h})
    return [uneven] * bool(d % h) + activation_errors(verb, activation, getattr(cfg, activation))


def check_params(params: Any, described: Any, label: str = "params") -> None:
    """Raise ShardingError unless `params` has the leaves of the described tree: tensors or Weights of as many dims.

    Their shapes are local, and this function does not know the split.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    leaves, structure = tree.flatten(params, is_weight)
    wanted, wanted_structure = tree.flatten(described)
    if structure == wanted_structure and all(isinstance(x, (Tensor, Weight)) and x.ndim == d.ndim
                                             for x, d in zip(leaves, wanted, strict=True)):  # fmt: skip
        return
    have, want = dict(tree.leaves_with_path(params, is_weight)), dict(tree.leaves_with_path(described))
    errors = []
    for path in dict.fromkeys([*want, *have]):
        x, where = have.get(path), tree.show(label, path)
        if path not in have:
            errors.append(fail(f"{where}: is missing", f"the model has {want[path]!r} there",
                               fix="pass the full tree of init, or of load, with the same config"))  # fmt: skip
        elif path not in want:
            errors.append(fail(f"{where}: is more than the model has", leaf=repr(x)[:60],
                               fix="pass the config of these parameters"))  # fmt: skip
        elif not isinstance(x, (Tensor, Weight)):
            errors.append(must_be(where, "a Tensor", x))
        elif x.ndim != want[path].ndim:
            errors.append(fail(f"{where}: a leaf of {x.ndim} dims", shape=list(x.shape), model=repr(want[path])))
    raise_all(errors)


def spec_of(specs: Any, name: str) -> Any:
    """Return the specs of a named part of the parameters; `specs` may be one `P` for all of them."""
    if is_spec(specs):
        return specs
    if not isinstance(specs, Mapping) or name not in specs:
        raise must_be("specs", f"a P, or a dict with the specs of {name!r}", specs,
                      fix="the specs that the parameters were placed with")  # fmt: skip
    return specs[name]


def fold_name(key: Tensor | None, name: str | int) -> Tensor | None:
    """`fold_in` if there is a key."""
    return None if key is None else fold_in(key, name)


def flat_linear(x: Tensor, p: Any) -> Tensor:
    """Compute x @ w + b with all output dims flattened: [B, T, D], w [D, F..], b [F..] if there is one -> [B, T, F]."""
    return nn.linear(x, p["w"].flatten(1), p["b"].flatten() if "b" in p else None)


def project_heads(x: Tensor, p: Any) -> Tensor:
    """Project [B, T, D] by w [D, heads.., K] -> [B, heads, T, K], with several dims of heads flattened."""
    heads, k = math.prod(p["w"].shape[1:-1]), p["w"].shape[-1]
    out: Tensor = flat_linear(x, p).unflatten(-1, (heads, k))  # type: ignore[no-untyped-call]
    return out.transpose(1, 2)


def split_qkv(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Split one projection [B, T, 3HK] of `shape` (3, H, K) into q, k and v, each [B, H, T, K]."""
    qkv: Tensor = x.unflatten(-1, tuple(shape))  # type: ignore[no-untyped-call]
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def _append_to_window(
    k: Tensor, v: Tensor, tokens: Tokens, cached: KeyValues | None, window: int
) -> tuple[Tensor, Tensor, KeyValues | None]:
    """Append keys and values [B, H, T, K] to the cached ones of `window` - 1 tokens: all, and the last of them."""
    if cached is not None:
        k, v = torch.cat([cached.k, k], 2), torch.cat([cached.v, v], 2)
    if not tokens.capacity:
        return k, v, None
    kept = slice(max(0, k.shape[2] - window + 1), None)
    return k, v, KeyValues(k[:, :, kept].clone(), v[:, :, kept].clone())  # a view would keep all of them


def _window_mask(tokens: Tokens, s: int, window: int) -> Tensor | None:
    """Return the mask [1 or B, 1, T, s] of the last `s` positions under a sliding window; None: all up to its own."""
    mask = None if tokens.mask is None else tokens.mask[..., tokens.mask.shape[-1] - s :]
    if s <= window:
        return mask
    near = nn.causal_mask(tokens.t, s, device=tokens.positions.device).triu(s - tokens.t - window + 1)[None, None]
    return near if mask is None else mask & near


def apply_blocks(
    block: Block, params: Any, x: Any, *, layout: Layout, described: Any, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, cache: Cache | None = None,
    each: Sequence[tuple[Any, ...]] | None = None, has_aux: bool = False, label: str = "params",
) -> tuple[Any, list[Any]]:  # fmt: skip
    """Apply the blocks `params["h"]` one after the other: (x, the keys and values of each for the next cache).

    Each block is unsharded just before it runs, by `specs["h"]`; `remat` recomputes it in backward. Without a `cache`
    the keys and values are not kept. `each` has more arguments for each block. With `has_aux` a block returns any
    tree in the place of its keys and values, which is kept. x is a tensor, or a tree that also has the tensors that
    all blocks share and pass on: those that are differentiated cannot be captured. Errors call the parameters `label`.
    """
    keep = has_aux or cache is not None
    if layout.stage:
        raise fail("model: its blocks are on stages, and each rank has some of them", layout=layout,
                   fix="fs.models.pipelined(model, cfg, layout=..., ...) for gradients, losses and logits")  # fmt: skip

    def one(p: Any, x: Tensor, inputs: tuple[Any, ...]) -> Any:
        out = block(p, x, *inputs)
        return out if keep else out[0]

    blocks = params.get("h")
    check_params({"h": blocks}, {"h": described["h"]}, label)
    cached = cache.blocks if cache is not None and cache.blocks else [None] * len(blocks)
    inputs = [(fold_name(key, i), cached[i], *([] if each is None else each[i])) for i in range(len(blocks))]
    block_specs = None if specs is None else spec_of(specs, "h")
    out = scan(one, blocks, x, specs=block_specs, axis=layout.unsharded(block_specs), each=inputs,
               shapes=described["h"], remat=remat, has_aux=keep, release=layout.release,
               prefetch=layout.prefetch, backward_prefetch=layout.backward_prefetch, dtype=layout.dtype,
               reduce_dtype=layout.reduce_dtype)  # fmt: skip
    return out if keep else (out, [])


class Pieces(NamedTuple):
    """The parts of a decoder on one batch, as a pipeline runs them on several ranks."""

    layout: Layout
    embed: Callable[[Any], Tensor]  # unsharded parameters that are not blocks -> the stream
    block_for: Callable[[Tensor], Block]  # the stream, or one like it -> the block
    norm: Callable[[Any, Tensor], Tensor]  # these parameters, the stream -> the normalized stream
    each: Sequence[tuple[Any, ...]] | None = None  # more arguments for each block

    def run(
        self, params: Any, names: Sequence[str], *, described: Any, specs: Any, **options: Any
    ) -> tuple[Tensor, dict[str, Any], list[Any]]:
        """Return the normalized stream after the last block, the unsharded `names`, and the outputs of the blocks."""
        top = self.layout.unshard(names, params, specs, described)
        x = self.embed(top)
        x, outs = apply_blocks(self.block_for(x), params, x, layout=self.layout, described=described, specs=specs,
                               each=self.each, **options)  # fmt: skip
        return self.norm(top, x), top, outs


class Run(NamedTuple):
    """The arguments that all blocks of one forward pass share."""

    cfg: Any
    layout: Layout
    tokens: Tokens
    angles: Any = None  # the cos and sin that rotate queries and keys

    def dropout(self, x: Tensor, rate: float, key: Tensor | None, name: str) -> Tensor:
        return self.layout.dropout(x, rate, key, name, self.tokens.total)

    def rope_angles(
        self, parameters: Mapping[str, Any], width: int, longest: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin that rotate queries and keys, [T, R/2], [B, T, R/2] with a mask; see `rope.frequencies`.

        For rope types that depend on the length of the sequence, that is the longest length so far on all ranks.
        """
        length: int | Tensor | None = None
        at = self.tokens.positions
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            length = self.tokens.stop
            if at.ndim == 2:
                last = (at + 1).max() if at.numel() else at.new_zeros(())  # a rank may have no rows
                length = pmax(last, self.layout.examples)
        rates, factor = rope.frequencies(parameters, width, longest, length=length, device=at.device)
        return rope.angles(at, rates, factor, dtype=dtype)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, cached: KeyValues | None, *, rate: float, heads: int,
        group: int = 1, window: int | None = None,
    ) -> tuple[Tensor, KeyValues | None]:  # fmt: skip
        """Attend causally to cached and new tokens: q [B, H@model, T, K] -> [B, T, HK@model], and the updated cache.

        k and v may have fewer heads, each for a `group` of neighbouring heads of q on the same rank. `heads` is H; the
        dropout of weights by `key` needs it. With a `window` a token attends to itself and the `window` - 1 before it,
        padding included, and no more are cached.
        """
        layout, tokens = self.layout, self.tokens
        if layout.context:
            shape = [len(q), heads // group, group, tokens.total, tokens.total]
            a = nn.context_attention(q, k, v, layout.context, mask=tokens.real, documents=tokens.documents,
                                     window=window, size=tokens.size,
                                     **layout.weight_dropout(rate, key, shape))  # fmt: skip
            return a.transpose(1, 2).flatten(2), None
        if window is None:
            k, v, cached = append_to_cache(k, v, tokens, cached)
            mask = tokens.mask
        else:
            k, v, cached = _append_to_window(k, v, tokens, cached, window)
            mask = _window_mask(tokens, k.shape[2], window)
        shape = [heads]
        if group > 1 and rate and key is not None:  # the drawn mask must have a dim of groups, by which heads are split
            q, k, v = q.unflatten(1, (k.shape[1], group)), k.unsqueeze(2), v.unsqueeze(2)  # type: ignore[no-untyped-call]
            mask, shape = None if mask is None else mask.unsqueeze(1), [heads // group, group]
        a = nn.attention(q, k, v, causal=mask is None, mask=mask,
                         **layout.weight_dropout(rate, key, [len(q), *shape, tokens.t, k.shape[-2]]))  # fmt: skip
        return a.flatten(1, -3).transpose(1, 2).flatten(2), cached


def pieces_of(
    block: Callable[..., Any], norm: Callable[[Run, Any, Tensor], Tensor], *,
    rotary: Callable[[Any], tuple[Mapping[str, Any], int, int]] | None = None,
    rates: Sequence[str] = (), embd: str = "", longest: str = "", each: Callable[[Any], Any] = lambda cfg: None,
) -> Callable[..., Pieces]:  # fmt: skip
    """Make the `pieces` of a decoder: (cfg, ids [B@data, T], layout=, key=, mask=Tokens) -> its parts on these ids.

    Args:
        block: (run, its parameters, stream, key, cached, its own arguments by `each(cfg)`) -> stream, updated cache.
        norm: (run, unsharded parameters, stream) -> the normalized stream.
        rotary: config -> the first arguments of `Run.rope_angles`, if positions rotate queries and keys.
        rates: the names of the config's rates of dropout; `embd`: the one of the embedded tokens; `longest`: the name
            of its number of positions, if it has one.
    """

    def pieces(cfg: Any, ids: Tensor, *, layout: Layout, key: Tensor | None, mask: Tokens) -> Pieces:
        if longest and mask.stop > getattr(cfg, longest):
            raise fail(f"{type(cfg).__module__.rpartition('.')[2]}: {mask.stop} tokens do not fit "
                       f"{getattr(cfg, longest)} positions", fix=f"a larger {longest}")  # fmt: skip
        run = Run(cfg, layout.with_batch(ids, key, *[getattr(cfg, rate) for rate in rates]), mask)

        def embed(top: Any) -> Tensor:
            x, at = run.layout.embed(ids, top["wte"], cfg.vocab_size), mask.positions
            if rotary is None:  # not `"wpe" in top`, which may gather it when it is used
                x = x + layout.time_slice(nn.embedding(at, top["wpe"]), at.ndim - 1)
            return run.dropout(x, getattr(cfg, embd) if embd else 0.0, key, "embd")

        def block_for(x: Tensor) -> Block:
            angles = None if rotary is None else run.rope_angles(*rotary(cfg), x.dtype)
            return functools.partial(block, run._replace(angles=angles))

        return Pieces(run.layout, embed, block_for, lambda top, x: norm(run, top, x), each(cfg))

    return pieces


def check_config(verb: str, cfg: Any, config: type) -> None:
    if not isinstance(cfg, config):
        home = type(cfg).__module__
        fix = f"call {home}.{verb}" if home.startswith("fshard.") and hasattr(sys.modules[home], verb) else ""
        raise must_be(f"{verb}: cfg", f"a {config.__module__.rpartition('.')[2]}.Config", cfg, fix)


def functions_of(
    apply: Callable[..., Any], config: type, losses: Callable[..., dict[str, Tensor]] | None = None
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Make the `loss` and `generate` of a decoder from its `apply`, the class of its configs, and `mixtral.losses`."""

    @checked
    def loss(
        cfg: Any, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
        key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None, documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mean cross-entropy in nats over the targets of all ranks: [] {I}. Targets of -100 are ignored.

        With experts the router's losses are added, as `cfg` weighs them.

        >>> gpt2.loss(cfg, params, ids, ids)
        tensor(3.19...)
        """
        check_config("loss", cfg, config)
        options: Any = {"specs": specs, "key": key, "remat": remat}
        if losses is not None:
            parts = losses(cfg, params, ids, targets, layout=layout, mask=mask, documents=documents, **options)
            total: Tensor = parts["cross_entropy"] + cfg.weigh(parts["balance"], parts["z"])
            return total
        layout, ids, targets, mask, documents = layout.to_zigzag(ids, targets, mask, documents)  # and so are logits
        logits = apply(cfg, params, ids, layout=layout, mask=mask, documents=documents, **options)
        return nn.cross_entropy(logits, targets, axis=layout.model, size=cfg.vocab_size, over=layout.examples or None,
                            donate=True)  # fmt: skip

    @checked
    def generate(
        cfg: Any, params: Any, ids: Tensor, *, new: int, layout: Layout = ONE_DEVICE, specs: Any = None,
        mask: Tensor | None = None, key: Tensor | None = None, on_token: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Generate `new` more tokens for each sequence: ids [B@data, T] -> [B@data, T + new]. Inside `shard_map`.

        Takes the likeliest token, the first among equals; with a `temperature`, draws one by `key`, the same on every
        mesh; `fs.decoding.Options` has all `options`; `eos` and `pad` are by default the `eos_token_id` and
        `pad_token_id` of `cfg`; with `eos=None` no token ends a sequence. Prompts of unequal lengths are padded on the
        left, and `mask` [B@data, T] is 0 there. `on_token(step, tokens)` is called on every rank with the new tokens
        [B@data] of each step, until all sequences of all ranks have ended.

        >>> gpt2.generate(cfg, params, ids, new=3).shape
        torch.Size([2, 7])
        """
        check_config("generate", cfg, config)
        layout.refuse_context("generate")
        layout = replace(layout, sequence=False)  # one token has no sequence to split
        chosen = Options.of(with_tokens(options, cfg.eos_token_id, cfg.pad_token_id, cfg.vocab_size))

        def step(ids: Tensor, mask: Tensor | None, cache: Cache) -> tuple[Tensor, Cache]:
            logits, cache = apply(cfg, params, ids, layout=layout, specs=specs, mask=mask, cache=cache)
            return logits[:, -1], cache

        decoder = Decoder(step, Cache.reordered, Cache(ids.shape[1] + new if ids.ndim > 1 else 0))
        return decoding.generate(decoder, ids, new=new, size=cfg.vocab_size, options=chosen, data=layout.data,
                                 model=layout.model, mask=mask, key=key, on_token=on_token)  # fmt: skip

    return loss, generate


def head_logits(cfg: Any, layout: Layout, top: dict[str, Any], x: Tensor, t: int) -> Tensor:
    """Return logits [B, T, V@model] of the normalized stream, by the head or by the tied embeddings."""
    w = top["wte"].transpose(0, 1) if cfg.tie_word_embeddings else top["head"]["w"]
    return nn.linear(layout.enter(x, t), w)


def decoder_of(
    config: type, init: Callable[[Any], Any], pieces: Callable[..., Pieces],
    logits: Callable[[Any, Layout, dict[str, Any], Tensor, int], Tensor] = head_logits,
    forward: Callable[..., tuple[Tensor, dict[str, Any], list[Any]]] | None = None,
) -> tuple[Callable[..., Any], Callable[..., Tensor]]:  # fmt: skip
    """Make `apply` and `states` of a decoder.

    Args:
        config: the class of its configs; `init` describes the parameters of one.
        pieces: of `pieces_of`.
        logits: (cfg, layout, unsharded parameters, stream, T) -> logits.
        forward: (cfg, params, ids, names, layout=, specs=, key=, remat=, mask=, cache=) -> the normalized stream after
            the last block, the unsharded parameters `names`, and the keys and values of each block; by default of the
            pieces.
    """

    def run(
        cfg: Any, params: Any, ids: Tensor, layout: Layout, specs: Any, key: Tensor | None, remat: bool,
        mask: Tensor | None, documents: Tensor | None, cache: Cache | None = None, without: Sequence[str] = ("h",),
    ) -> tuple[Tensor, dict[str, Any], list[Any]]:  # fmt: skip
        names = [name for name in shapes_of(init, cfg) if name not in without]
        inside, ids, mask, documents = layout.to_zigzag(ids, mask, documents)
        tokens = Tokens.of(ids, mask, cache, documents, layout.context)
        options: Any = {"specs": specs, "key": key, "remat": remat, "cache": cache}
        if forward is not None:
            return forward(cfg, params, ids, names, layout=inside, mask=tokens, **options)
        parts = pieces(cfg, ids, layout=inside, key=key, mask=tokens)
        return parts.run(params, names, described=shapes_of(init, cfg), **options)

    @checked
    def apply(
        cfg: Any, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
        key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None, cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return logits of the next token: ids [B@data, T] -> [B@data, T, V@model]; with `cache`, (logits, new cache).

        `params` are as placed. Pass their `specs` if they vary over `layout.data` or are split over it (FSDP): each
        block is then unsharded just before it runs. `key` turns dropout on; `remat` recomputes blocks in backward.
        `mask` [B@data, T] is 0 for padding; with a cache it has entries for the cached tokens too. `documents`
        [B@data, T] are numbers of packed texts: a token attends to its text, whose positions begin with 0.

        With the rope_type dynamic or longrope, angles depend on the longest sequence of the batch so far. Cached keys
        are not rotated again, as in transformers: the logits differ from one call with all the tokens.

        >>> gpt2.apply(cfg, params, ids).shape
        torch.Size([2, 4, 32])
        """
        check_config("apply", cfg, config)
        x, top, blocks = run(cfg, params, ids, layout, specs, key, remat, mask, documents, cache)
        out = layout.from_zigzag(logits(cfg, layout, top, x, ids.shape[1]))
        return out if cache is None else (out, cache.updated(blocks, ids.shape[1]))

    @checked
    def states(
        cfg: Any, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
        key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None, documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the last hidden states: ids [B@data, T] -> [B@data, T, D]{I model}; arguments as of `apply`.

        The parameters need no head.

        >>> gpt2.states(cfg, params, ids).shape
        torch.Size([2, 4, 16])
        """
        check_config("states", cfg, config)
        x, *_ = run(cfg, params, ids, layout, specs, key, remat, mask, documents, without=("h", "head"))
        return layout.from_zigzag(layout.whole(x, ids.shape[1]))

    return apply, states


def shapes_of(init: Callable[[Any], Any], cfg: Any) -> Any:
    """Return the tree `init(cfg)`, made once for each config: a forward pass needs its shapes."""
    if torch.compiler.is_dynamo_compiling():
        return init(cfg)
    return _described(init, cfg)


@functools.lru_cache(maxsize=64)
def _described(init: Callable[[Any], Any], cfg: Any) -> Any:
    return init(cfg)

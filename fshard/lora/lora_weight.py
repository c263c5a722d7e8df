"""Adapted weights: a matrix and its factors, used together without building their sum.

Legend: B batch, T time, D inputs, F outputs, r rank, V vocabulary; [D@model] is a dim split over an axis; {V} varies
over it, {I} does not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import nn, random, tree
from fshard._core.microbatch import flattened_rows
from fshard._core.ops import known_sizes
from fshard._core.region import known_axes, region
from fshard._core.weight import Leaf, Part, Weight
from fshard.collectives import psum, pvary
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.nn.decoding import global_batch
from fshard.random import fold_in
from fshard.spec import Axis, P, describe, names_of, same_placement, total

from .adapted import AdaptedWeight, Placement, aligned, given_specs, model_axes, placement, sum_of_factors
from .config import Config, check_weight
from .targets import Adapted, Of, Targets, another_shape, by_part, checked_leaves, factor_shapes, named_leaves, specs_of


@dataclass(frozen=True, eq=False, repr=False)
class LoraWeight(AdaptedWeight):
    """A matrix with low-rank factors: x @ base + (dropout(x) @ a @ b) * scale. Made by `apply`.

    `base` may be a Weight: another adapter's, or a quantized matrix.

    >>> config, params = fs.lora.Config("w", rank=2), {"w": torch.ones(3, 4)}
    >>> adapters = fs.materialize(fs.lora.init(config, params), P(), mesh, key=fs.key(0))
    >>> view = fs.lora.apply(config, params, fs.device_get(adapters))["w"]
    >>> type(view).__name__, fs.nn.linear(torch.ones(2, 3), view).shape
    ('LoraWeight', torch.Size([2, 4]))
    """

    children = ("base", "a", "b", "magnitude", "key")

    base: Any  # [in.., out..]; flattened as its user asks
    a: Tensor  # [in.., r]
    b: Tensor  # [r, out..]
    magnitude: Tensor | None  # [out..]
    key: Tensor | None  # of dropout
    scale: float
    rate: float
    leaf: Leaf
    inputs: int  # the number of input dims of the base, as flattened now
    rank: int
    specs: tuple[P, ...]  # of a, b, magnitude
    split: tuple[Axis, tuple[Axis, ...], Axis]  # axes of the rows of x; of the base, inside, by input; of its outputs
    sizes: tuple[int, ...]  # global, of the inputs, for dropout
    batch: int | None

    def parts(self, spec: P | None, shape: Sequence[int] | None) -> list[Part]:
        shapes: Any = [None] * len(self.specs)
        if shape is not None:
            shapes = by_part(self.leaf, tuple(shape), self.rank, self.magnitude is not None).values()
        factors = zip(self.specs, shapes, strict=True)
        return [*self.base_parts(spec, shape), *factors, *([] if self.key is None else [(None, None)])]

    def transpose(self, first: int, second: int) -> Any:
        """Return the transposed table without its adapter, which a head tied to the table does not use, as in PEFT."""
        if self.leaf.layout != "table":
            raise self._refused("transpose")
        return self.base.transpose(first, second)

    def __repr__(self) -> str:
        return f"LoraWeight({describe(self)}, rank={self.rank})"

    def linear(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        """Compute x @ base + b, plus the adapters' part: x [..., D] -> [..., F]."""
        if self.ndim != 2:
            raise fail(f"linear: w is {self!r}", fix="flatten its inputs, and its outputs, to [D, F]")
        y = base = self._layers[0].base_linear(x, b)
        for layer in self._layers:
            y = layer._adapted(x, y, b)
        return y.to(base.dtype)

    @property
    def _layers(self) -> list[LoraWeight]:
        """The adapters of the matrix: first the one that was applied first, last this one."""
        return [*(self.base._layers if isinstance(self.base, LoraWeight) else ()), self]

    def _adapted(self, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        """Add the part of this adapter to y, in the wider of the dtypes of y and of a."""
        dropped = self._dropped(x.to(self.a.dtype))
        low = nn.linear(nn.linear(dropped, self.a.flatten(0, -2)), self.b.flatten(1))
        if self.magnitude is None:
            return torch.add(y, low, alpha=self.scale)  # one pass, without a tensor of the outputs' size between
        factor = self.magnitude.flatten() / self._norm()
        # Liu et al.: the base's part is computed from the same, dropped, inputs.
        plain = y if bias is None else y - bias
        if self.key is not None:
            plain = nn.linear(dropped, self._root().to(dropped.dtype))
        return y + (factor - 1) * plain + factor * low * self.scale

    def _root(self) -> Tensor:
        """Return the matrix below all adapters, [D, F]."""
        base = self._layers[0].base
        matrix: Tensor = base.dense() if isinstance(base, Weight) else base
        return matrix.transpose(0, 1) if self.leaf.layout == "oi" else matrix.flatten(0, self.inputs - 1).flatten(1)

    def _norm(self) -> Tensor:
        """Return the norm of each output's weights of w + s a b, which is not built: [F]{I}, without a gradient."""
        a, b, s = self.a.detach().flatten(0, -2), self.b.detach().flatten(1), self.scale
        w = self._root().detach().to(a.dtype)
        squares = torch.linalg.vector_norm(w, dim=0).square() + 2 * s * ((a.T @ w) * b).sum(0)
        squares = squares + s * s * ((a.T @ a @ b) * b).sum(0)
        axes = tuple(name for axis in self.split[1] for name in names_of(axis))  # of the inputs
        return torch.sqrt(psum(squares, axes or None).clamp(min=0))

    def _dropped(self, x: Tensor) -> Tensor:
        """Drop inputs of the adapter, x [B@rows, ..., D@inputs], by global index."""
        if self.key is None or not self.rate:
            return x
        rows, inputs, outputs = self.split
        batch = self.batch if self.batch is not None else global_batch("lora dropout", len(x), rows,
                                                                       word="lora.apply(batch=)")  # fmt: skip
        shape = (batch, *x.shape[1:-1], *self.sizes)
        spec = P(rows, *[None] * (x.ndim - 2), *inputs)
        with flattened_rows():
            keep = random.bernoulli(self.key, shape, p=1 - self.rate, spec=spec, device=x.device)
        if keep.numel() != x.numel():
            raise fail("lora dropout: x is not this rank's part of the global array", x=list(x.shape),
                       part=list(keep.shape), shape=list(shape), spec=spec,
                       fix="x is [B@data, ..., D]; pass the axes of its rows as data=, and batch=")  # fmt: skip
        # Over axes that split only outputs each rank has all of x, and drops the same inputs.
        return torch.where(pvary(keep, outputs).reshape(x.shape), x / (1 - self.rate), 0)

    def embed(
        self, ids: Tensor, *, axis: Axis = None, size: int | None = None, padding_idx: int | None = None
    ) -> Tensor:
        """Look up rows of the table, plus the adapters' part: ids [...] -> [..., F], over `axis` as `nn.embedding`.

        The row of `padding_idx` gets no gradient in the table and in `a`; the other factors do, as in PEFT.
        """
        if self.leaf.layout != "table":
            raise self._refused("embedding")
        look_up = functools.partial(nn.embedding, ids, axis=axis, size=size, padding_idx=padding_idx)
        y = base = look_up(self._layers[0].base)
        for layer in self._layers:
            y = y + nn.linear(look_up(layer.a), layer.b) * layer.scale
            if layer.magnitude is not None:
                y = (layer.magnitude / layer._norm()) * y
        return y.to(base.dtype)


@checked
def apply(
    cfg: Config, params: Any, adapters: Mapping[str, Any], *, of: Of = None, specs: Any = None,
    adapter_specs: Any = None, data: Axis = None, model: Axis = None, key: Tensor | None = None,
    shapes: Any = None, batch: int | None = None, weight: float = 1.0,
) -> Any:  # fmt: skip
    """Return the parameters with a `LoraWeight` at each adapted leaf, for any model that uses matrices by `nn`.

        y = x @ w + (dropout(x) @ a @ b) * s     added in the dtype of a, rounded to the dtype of x @ w

    The merged weight is never built, except of `cfg.parameters`: each rank adds the factors to its part of those.
    Differentiate with respect to `adapters`: the base then has no gradient, no buffer for one, and no transfer. Several
    adapters: apply again, to the result. Pass to `unshard`, `scan` and the models the specs of the base: each node
    knows the specs of its factors.

    Args:
        of: as for `init`.
        specs: of params, a prefix; needed on a mesh.
        adapter_specs: of the adapters; by default by `lora.specs`. A factor that `model` does not split, of a
            base that it splits, is the same on its ranks: it is sliced, or its gradient summed, over `model`.
        data: the axes that split the batch, for dropout.
        model: the axes over which the base stays split inside the model.
        key: turns dropout on; each leaf folds in its path. The same mask on every mesh.
        shapes, batch: the described tree of params, and the number of rows on all ranks. Both only for dropout where an
            axis does not divide some dim: they save an exchange of sizes, which a compiled program cannot make.
        weight: multiplies s.

    >>> cfg = fs.lora.Config(["up"], rank=1, alpha=2)
    >>> adapters = {"up": {"a": torch.ones(2, 1), "b": torch.ones(1, 2)}}
    >>> params = fs.lora.apply(cfg, {"up": torch.eye(2)}, adapters)
    >>> nn.linear(torch.tensor([[1.0, 2.0]]), params["up"])
    tensor([[7., 8.]])

    Raises ShardingError listing every adapter that is missing, that is of no leaf of `cfg`, or whose tensors do not
    fit its leaf.
    """
    for axis in (data, model):
        known_axes("lora.apply", region("lora.apply"), axis) if axis else None
    check_weight("lora.apply", weight)
    if batch is not None and batch < 0:
        raise fail(f"lora.apply: batch={batch}", fix="the number of rows on all ranks")
    over = model_axes("lora.apply", model, specs)
    targets = Targets.among("lora.apply", cfg, named_leaves("lora.apply", params), of)
    leaves = checked_leaves(targets, cfg, adapters, (Tensor,))
    base_specs = {} if specs is None else targets.specs(params, specs)
    factors, placed = _aligned(cfg, leaves, adapters, base_specs, adapter_specs, over)
    has_dropout = cfg.dropout > 0 and key is not None
    sizes = _input_sizes(factors, placed, leaves, shapes) if has_dropout else {}
    found: dict[str, Any] = {}
    for name, _, x, leaf in leaves:
        parts = factors[name]
        if leaf is not None and leaf.is_summed:
            scale = cfg.scale_of(leaf.module) * weight
            found[name] = x + (sum_of_factors(leaf, parts["a"], parts["b"]) * scale).to(x.dtype)
            continue
        found[name] = parts["value"] if leaf is None else LoraWeight(
            base=x, a=parts["a"], b=parts["b"], magnitude=parts.get("magnitude"),
            key=fold_in(key, name) if has_dropout and key is not None else None,
            scale=cfg.scale_of(leaf.module) * weight, rate=cfg.dropout, leaf=leaf, inputs=leaf.inputs,
            rank=cfg.rank_of(leaf.module), specs=tuple(where.spec for where in placed[name].parts.values()),
            split=(data, placed[name].inputs, placed[name].outputs), sizes=sizes.get(name, ()), batch=batch,
        )  # fmt: skip
    return targets.replaced(params, found)


class _Placed(NamedTuple):
    """The placement of the factors as a leaf uses them."""

    parts: dict[str, Placement]  # of a, b, magnitude
    inputs: tuple[Axis, ...]  # the axes over which each input dim stays split inside the model
    outputs: Axis  # the axes of all output dims


@functools.lru_cache(maxsize=4096)  # `apply` asks for each leaf in every step
def _placed(leaf: Leaf, ndim: int, base: P, given: tuple[P | None, ...], model: tuple[str, ...]) -> _Placed:
    """Return the placement of the factors of a leaf, by its spec and their `given` ones: by default its placement."""
    dora = len(given) == 3
    wanted = specs_of(leaf, base, ndim, dora, "specs")
    inputs, outputs = leaf.split(tuple(tuple(a for a in axes if a in model) for axes in base.parts(ndim)))
    parts = {part: placement(part, wanted[part], spec, base, len(dims), model) for (part, dims), spec
             in zip(by_part(leaf, tuple(range(ndim)), None, dora).items(), given, strict=True)}  # fmt: skip
    return _Placed(parts, tuple(axes or None for axes in inputs), tuple(a for axes in outputs for a in axes) or None)


def _aligned(
    cfg: Config, leaves: Sequence[Adapted], adapters: Mapping[str, Any], base_specs: dict[str, P], adapter_specs: Any,
    model: tuple[str, ...],
) -> tuple[dict[str, dict[str, Tensor]], dict[str, _Placed]]:  # fmt: skip
    """Return the factors as their bases use them, and their placements."""
    given = given_specs("lora.apply", adapters, adapter_specs)
    placed: dict[str, _Placed] = {}
    errors: list[ShardingError] = []
    for name, _, x, leaf in leaves:
        base, factors = base_specs.get(name, P()), adapters[name]
        if leaf is None:
            spec = given.get((name, "value"), base)
            if not same_placement(spec.with_entries(*spec, memory=base.memory), base, x.ndim):
                errors.append(fail(f"lora.apply: adapters[{name!r}]['value'] replaces a leaf with another spec",
                                   value=spec, leaf=base, fix="the specs of lora.specs"))  # fmt: skip
            continue
        over = (*model, *base.axes) if leaf.is_summed else model
        try:
            own = tuple(given.get((name, part)) for part in sorted(factors))
            here = placed[name] = _placed(leaf, x.ndim, base, own, over)
        except ShardingError as e:
            errors.append(ShardingError(f"lora.apply: {name!r}: {e}"))
            continue
        sizes = factor_shapes(cfg, leaf, tuple(x.shape))
        for part, factor in sorted(factors.items()):
            if any(factor.shape[dim] != sizes[part][dim] for dim in here.parts[part].same):
                errors.append(another_shape(f"lora.apply: adapters[{name!r}]", part, factor, x,
                                            cfg.rank_of(leaf.module)))  # fmt: skip
    parts = {(name, part): here.parts[part] for name, here in placed.items() for part in adapters[name]}
    out, more = aligned("lora.apply", adapters, parts, given)
    raise_all([*errors, *more])
    return out, placed


def _input_sizes(
    factors: dict[str, dict[str, Tensor]], placed: dict[str, _Placed],
    leaves: Sequence[Adapted], shapes: Any,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Return the global sizes of the input dims of each adapted leaf: from `shapes`, or sums of local ones."""
    if shapes is not None:
        known = {path: tuple(getattr(x, "shape", ())) for path, x in tree.leaves_with_path(shapes)}
        raise_all([must_be(f"lora.apply: shapes, at {name!r},", f"a leaf of {x.ndim} dims", known.get(path))
                   for name, path, x, _ in leaves if len(known.get(path, ())) != x.ndim])  # fmt: skip
        return {name: leaf.split(known[path])[0] for name, path, _, leaf in leaves if leaf is not None}
    local = {name: list(factors[name]["a"].shape[:-1]) for name in placed}
    by_axes: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for name, where in placed.items():
        for dim, axes in enumerate(where.parts["a"].spec.parts(len(local[name]) + 1)[:-1]):
            if axes:
                by_axes.setdefault(axes, []).append((name, dim))
    for axes, which in by_axes.items():
        sizes = known_sizes("lora.apply", [local[name][dim] for name, dim in which], axes, word="shapes=")
        for (name, dim), n in zip(which, sizes, strict=True):
            local[name][dim] = total(n)
    return {name: tuple(sizes) for name, sizes in local.items()}

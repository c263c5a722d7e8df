"""A frozen base in 8 bits: int8 weights with one scale for each output, dequantized where a block uses them.

Legend: D inputs, F outputs; {V} varies over an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fshard import nn, tree
from fshard._core.host_memory import to_device
from fshard._core.region import in_region
from fshard._core.weight import Leaf, Part, Weight, is_weight, split_dims
from fshard.collectives import pmax
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.init import Deferred
from fshard.init.deferred import Initializer, Scope
from fshard.reshard import device_get
from fshard.schedule.unshard import placements
from fshard.shard_map import shard_map
from fshard.sharded import Sharded
from fshard.spec import Box, P, box_shape

from .config import ALL_LINEAR, Config
from .targets import Targets, named_leaves

LARGEST = 127


@dataclass(frozen=True, eq=False)
class Int8(Weight):
    """A matrix as values * scale: |error| of an element is at most half the scale of its output. Made by `quantize`.

    >>> quantize({"w": torch.ones(1, 2)})["w"].values
    tensor([[127, 127]], dtype=torch.int8)
    """

    children = ("values", "scale")

    values: Any  # int8[in.., out..], or int8[out, in]
    scale: Any  # float32[out..]
    inputs: int  # the number of input dims
    layout: Literal["io", "oi"] = "io"  # the order of the dims of `values`

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.scale.dtype
        return dtype

    def parts(self, spec: P | None, shape: Sequence[int] | None) -> list[Part]:
        outputs = None if spec is None else _outputs_of(spec, self.ndim, self.inputs, self.layout)
        sizes = None if shape is None else split_dims(tuple(shape), self.inputs, self.layout)[1]
        return [(spec, None if shape is None else tuple(shape)), (outputs, sizes)]

    def flatten(self, start: int = 0, end: int = -1) -> Int8:
        if self.layout == "oi":  # the weight of a module, which flattens none
            raise self._refused("flatten")
        start, end, inputs = self.flattened(self.inputs, start, end)
        values, scale = self.values.flatten(start, end), self.scale
        if end >= self.inputs:
            scale = scale.flatten(start - self.inputs, end - self.inputs)
        return replace(self, values=values, scale=scale, inputs=inputs)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a floating dtype."""
        return _dequantized(self.values, _broadcast(self.scale, self.layout), dtype)

    def dense(self) -> Tensor:
        """Return the matrix in the dtype of the scale."""
        return self.dequantize(self.dtype)

    def linear(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        """Compute x @ w + b, with w in the dtype of x: x [..., D] -> [..., F]. Backward dequantizes again."""
        if self.scale.requires_grad:
            raise fail(f"linear: Int8{list(self.shape)} is differentiated, and is frozen",
                       fix="differentiate only the adapters")  # fmt: skip
        transposed = self.layout == "oi"
        if torch.compiler.is_dynamo_compiling():  # which refuses a jvp, and saves what it needs by itself
            w = self.dequantize(x.dtype)
            return nn.linear(x, w.mT if transposed else w, b)
        scale = _broadcast(self.scale, self.layout)
        y: Tensor = _Linear.apply(x, self.values, scale, transposed)  # type: ignore[no-untyped-call]
        return y if b is None else y + b


def _broadcast(scale: Tensor, layout: str | None) -> Tensor:
    """Return the scales of the outputs in a shape that multiplies the values."""
    return scale.unsqueeze(-1) if layout == "oi" else scale


def _dequantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) * scale.to(dtype)


class _Linear(torch.autograd.Function):
    """Compute x @ w, or with `transposed` x @ w.T, of an int8 matrix; only the int8 is kept for backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor, scale: Tensor, transposed: bool) -> Tensor:
        w = _dequantized(values, scale, x.dtype)
        return torch.nn.functional.linear(x, w if transposed else w.transpose(0, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, values, scale, ctx.transposed = inputs
        ctx.save_for_backward(values, scale)
        ctx.save_for_forward(values, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        values, scale = ctx.saved_tensors
        return _Linear.apply(grad, values, scale, not ctx.transposed), None, None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, *_: Any) -> Tensor | None:
        values, scale = ctx.saved_tensors
        return None if dx is None else _Linear.apply(dx, values, scale, ctx.transposed)  # type: ignore[no-untyped-call]


# --- quantization ---------------------------------------------------------------------------------------------


@checked
def quantize(
    params: Any, targets: str | Sequence[str] = ALL_LINEAR, *, exclude: str | Sequence[str] = (),
    of: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Return the parameters with the matrices of the targets in 8 bits: a frozen base for adapters.

        w [in.., out..]  ->  Int8: values int8[in.., out..], scale float32[out..]
        w [out, in]      ->  Int8: values int8[out, in], scale float32[out]       of nn.Linear in a module of `fs.defer`

        scale = max |w| over the inputs / 127     values = round(w / scale), to even     |w - values scale| <= scale / 2

    The result is the same on every mesh, bit for bit: the largest element is taken over all ranks. A gather of it over
    `data` moves 1 byte for each element, and a block in `scan` dequantizes it where it is used, in forward and again in
    backward; nothing keeps the dequantized matrix. Pass the model the specs of `params`; `lora.part_specs` makes those
    of the parts, for `shard_map`, `materialize` and `checkpoint.restore`.

    Args:
        params: a tree of placed leaves, of described ones, which are then quantized while they are filled, a leaf at a
            time, or of tensors. Described, a device reads all inputs of its outputs.
        targets, exclude, of: as for `lora.Config` and `lora.init`; `of` says which dims are inputs.
            Tables of embeddings are not quantized.

    >>> q = fs.lora.quantize({"up": torch.tensor([[1.0, -0.5], [0.25, 4.0]])})["up"]
    >>> q.values.tolist(), q.dequantize(torch.float32).round(decimals=2).tolist()
    ([[127, -16], [32, 127]], [[1.0, -0.5], [0.25, 4.0]])

    Raises ShardingError for targets that name nothing, listing every target that is not a matrix and every one
    with an element that is not finite, and inside `shard_map`.
    Source: Dettmers et al., 2022, "LLM.int8()", for a scale a row; 2023, "QLoRA", for adapters on a quantized base.
    """
    if in_region():
        raise fail("lora.quantize: called inside shard_map, where every leaf is a local part", fix="call it outside")
    tree.check_leaves("lora.quantize", "params", params, (Tensor, Deferred, Sharded))
    named = named_leaves("lora.quantize", params)
    found = Targets.among("lora.quantize", Config(targets, exclude=exclude), named, of)
    chosen = found.adapted
    raise_all([error for name, (leaf, x) in chosen.items()
               for error in _errors(tree.show("params", named[name][0]), leaf, x)])  # fmt: skip
    made = _quantize_placed({name: (x, leaf) for name, (leaf, x) in chosen.items() if isinstance(x, Sharded)})
    for name, (leaf, x) in chosen.items():
        if name not in made:
            made[name] = (_quantize_described if isinstance(x, Deferred) else _of_tensor)(name, x, leaf)
    return found.replaced(params, made)


@checked
def dequantize(params: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return the parameters with floating matrices in the place of 8 bits, and the same placement: for `merge`.

    >>> q = fs.lora.quantize({"up": torch.tensor([[2.0, -1.0], [127.0, 127.0]])})
    >>> fs.lora.dequantize(q)["up"]
    tensor([[  2.,  -1.],
            [127., 127.]])

    Raises ShardingError inside `shard_map`, and for described leaves, which have no values.
    """
    if in_region():
        raise fail("lora.dequantize: called inside shard_map", fix="call it outside; inside, a Weight is used directly")
    tree.check_leaves("lora.dequantize", "params", params, (Tensor, Sharded))
    nodes, structure = tree.flatten(params, is_weight)
    chosen = {i: x for i, x in enumerate(nodes) if isinstance(x, Int8)}
    made = {i: x.dequantize(dtype) for i, x in chosen.items() if isinstance(x.values, Tensor)}
    placed = {i: x for i, x in chosen.items() if i not in made}
    if placed:
        mesh = next(x.values.mesh for x in placed.values())
        specs = {i: tree.map(lambda leaf: leaf.spec, x) for i, x in placed.items()}
        step = shard_map(lambda qs: {i: to_device(q).dequantize(dtype) for i, q in qs.items()}, mesh=mesh,
                         in_specs=(specs,), out_specs={i: x.values.spec for i, x in placed.items()})  # fmt: skip
        made |= step(placed)
    return tree.unflatten(structure, [made.get(i, x) for i, x in enumerate(nodes)])


@checked
def part_specs(params: Any, specs: Any) -> Any:
    """Return the specs of a tree with Weights, one for each tensor, from the specs of its matrices, or a prefix.

    >>> q = fs.lora.quantize({"up": fs.init.normal((4, 6))})
    >>> fs.lora.part_specs(q, {"up": P("data", "model")})["up"].scale
    P('model')
    """
    return tree.unflatten(tree.structure(params), placements("lora.part_specs", params, specs)[0])


def _errors(label: str, leaf: Leaf, x: Any) -> list[ShardingError]:
    if leaf.layout not in ("io", "oi"):
        return [fail(f"lora.quantize: {label} is no matrix [in, out] or [out, in]",
                     fix="leave it out of targets, or exclude it", module=leaf.module, layout=leaf.layout)]  # fmt: skip
    if not isinstance(x, (Tensor, Deferred, Sharded)) or not x.dtype.is_floating_point:
        return [must_be(f"lora.quantize: {label}", "a floating leaf", x, fix="leave it out of targets, or exclude it")]
    return []


def _outputs_of(spec: P, ndim: int, inputs: int, layout: str | None) -> P:
    return spec.with_entries(*split_dims(spec.parts(ndim), inputs, layout)[1])


def _largest(w: Tensor, leaf: Leaf) -> Tensor:
    """Return the largest |w| of each output, in float32; 0 without inputs."""
    inputs, outputs = leaf.split(tuple(range(w.ndim)))
    if not math.prod(w.shape[d] for d in inputs):
        return torch.zeros([w.shape[d] for d in outputs], device=w.device)
    return w.abs().amax(inputs).float()


def _rounded(w: Tensor, largest: Tensor, leaf: Leaf) -> tuple[Tensor, Tensor]:
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    scale = torch.where(scale > 0, scale, torch.finfo(torch.float32).tiny)  # largest / 127 may round to 0
    return (w.float() / _broadcast(scale, leaf.layout)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def _int8(values: Any, scale: Any, leaf: Leaf) -> Int8:
    return Int8(values, scale, leaf.inputs, "oi" if leaf.layout == "oi" else "io")


def _not_finite(name: str) -> ShardingError:
    return fail(f"lora.quantize: {name!r} has an element that is not finite", fix="exclude it, or repair it")


def _of_tensor(name: str, x: Tensor, leaf: Leaf) -> Int8:
    largest = _largest(x.detach(), leaf)
    if not largest.isfinite().all():
        raise _not_finite(name)
    return _int8(*_rounded(x.detach(), largest, leaf), leaf)


def _quantize_placed(leaves: dict[str, tuple[Sharded, Leaf]]) -> dict[str, Int8]:
    """Quantize placed leaves, all in one call on their mesh."""
    if not leaves:
        return {}
    mesh = next(x.mesh for x, _ in leaves.values())
    specs = {name: x.spec for name, (x, _) in leaves.items()}
    scales = {name: _outputs_of(x.spec, x.ndim, leaf.inputs, leaf.layout) for name, (x, leaf) in leaves.items()}

    @shard_map(mesh=mesh, in_specs=(specs,), out_specs=(specs, scales, P()))
    def run(ws: dict[str, Tensor]) -> Any:
        values, found, wrong = {}, {}, {}
        for name, w in to_device(ws).items():
            leaf = leaves[name][1]
            largest = _largest(w, leaf)
            wrong[name] = pmax((~largest.isfinite()).any().int(), specs[name].axes or None)
            axes = tuple(a for split in leaf.split(specs[name].parts(w.ndim))[0] for a in split)
            values[name], found[name] = _rounded(w, pmax(largest, axes or None), leaf)
        return values, found, wrong

    values, found, wrong = run({name: x for name, (x, _) in leaves.items()})
    if mesh.kind != "abstract":
        raise_all([_not_finite(name) for name, flag in device_get(wrong).items() if flag])
    return {name: _int8(values[name], found[name], leaf) for name, (_, leaf) in leaves.items()}


@dataclass(frozen=True)
class _Part:
    """The values, or the scale, of another leaf in 8 bits."""

    name: str
    described: Deferred
    leaf: Leaf
    part: Literal["values", "scale"]

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = self.described
        of_inputs, of_outputs = self.leaf.split(tuple(range(x.ndim)))
        rows = dict(zip(of_outputs, self.leaf.split(box)[1] if self.part == "values" else box, strict=True))
        full = tuple(rows.get(d, slice(0, n)) for d, n in enumerate(x.shape))
        owners = () if x.scope is None else x.scope.owners
        init: Initializer = x.init
        w = init.fill(key if owners else key[0], x.shape, full, x.dtype, device)
        q = _of_tensor(self.name, w.reshape(box_shape(full)), self.leaf)
        if self.part == "scale":
            scale: Tensor = q.scale.to(dtype)
            return scale
        values: Tensor = q.values[tuple(box[d] if d in of_inputs else slice(None) for d in range(x.ndim))]
        return values.clone()

    def describe(self) -> str:
        return f"{self.part} of int8({self.described!r})"


def _quantize_described(name: str, x: Deferred, leaf: Leaf) -> Int8:
    scope = x.scope or Scope(f"params.{name}")

    def part(which: Literal["values", "scale"], shape: tuple[int, ...], dtype: torch.dtype) -> Deferred:
        draws = scope.owners or (scope.name,)
        return Deferred(shape, dtype, _Part(name, x, leaf, which), Scope(f"{scope.name}.{which}", draws))

    return _int8(part("values", x.shape, torch.int8), part("scale", leaf.split(tuple(x.shape))[1], torch.float32), leaf)

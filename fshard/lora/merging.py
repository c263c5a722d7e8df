"""Adapters merged into their bases, and taken out again: placed leaves, each part by the rank that has it.

Source: PEFT's `merge` and `unmerge`: its products are [out, r] @ [r, in], and its roundings those below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.region import in_region
from fshard._core.weight import Leaf
from fshard.collectives import psum
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.reshard import reshard
from fshard.shard_map import shard_map
from fshard.sharded import Sharded, device_put
from fshard.spec import P

from .adapted import sum_of_factors
from .config import Config, check_weight
from .int8 import Int8
from .targets import Adapted, Of, Targets, another_shape, checked_leaves, factor_shapes, named_leaves, specs_of

# (weight, s A B, the factors, the leaf, the axes that split its inputs) -> the new weight
_Change = Callable[[Tensor, Tensor, Mapping[str, Tensor], Leaf, tuple[str, ...]], Tensor]


@checked
def merge(
    cfg: Config, params: Any, adapters: Mapping[str, Any], *, of: Of = None, safe: bool = False, weight: float = 1.0
) -> Any:
    """Return the parameters with W + s A B in the place of W, and the values of modules to save. Outside `shard_map`.

        plain  bf16(W32 + D)           safe  bf16(W32 + bf16(D)), D = s A B in the dtype of the factors

    Leaves are `Sharded`, of any specs, or plain tensors. Every rank merges its part: the base does not move, and of the
    factors a rank gets what it lacks. On one device the bits are as by PEFT's merge. On a mesh, two things are added in
    another order: the r terms of a product, by the matrix library, and the norms of DoRA where an axis splits them.

    A table that a head is tied to is merged for the head too, which its adapter does not reach. A second DoRA adapter
    must not be merged on top of another adapter, which would change its norms.

    Args:
        of: as for `init`.
        safe: refuse a result that is not finite, on every rank, before any leaf is returned.
        weight: as for `apply`.

    >>> adapters = {"up": {"a": torch.ones(2, 1), "b": torch.ones(1, 2)}}
    >>> fs.lora.merge(fs.lora.Config(["up"], rank=1, alpha=2), {"up": torch.eye(2)}, adapters)["up"]
    tensor([[3., 2.],
            [2., 3.]])

    Raises ShardingError listing every adapter that is missing, or of no leaf of `cfg`, and with `safe` every leaf that
    is not finite.
    """

    def change(w: Tensor, delta: Tensor, factors: Mapping[str, Tensor], leaf: Leaf, axes: tuple[str, ...]) -> Tensor:
        if "magnitude" in factors:
            full = w + delta
            dims = leaf.split(tuple(range(w.ndim)))[0]
            norms = torch.linalg.vector_norm(full, dim=dims, keepdim=True)
            if axes:
                norms = psum(norms.square(), axes).sqrt()
            made: Tensor = factors["magnitude"].reshape(norms.shape) / norms * full
            return made.to(w.dtype)
        return w + delta.to(w.dtype) if safe or leaf.layout == "table" else (w + delta).to(w.dtype)

    return _changed("lora.merge", cfg, params, adapters, of, weight, change, safe)


@checked
def unmerge(cfg: Config, params: Any, adapters: Mapping[str, Any], *, of: Of = None, weight: float = 1.0) -> Any:
    """Return the parameters that `merge` took, up to rounding: W - s A B, as PEFT's. Outside `shard_map`.

    >>> adapters = {"up": {"a": torch.ones(2, 1), "b": torch.ones(1, 2)}}
    >>> fs.lora.unmerge(fs.lora.Config(["up"], rank=1, alpha=2), {"up": torch.full((2, 2), 2.0)}, adapters)["up"]
    tensor([[0., 0.],
            [0., 0.]])

    Raises ShardingError for what merge has overwritten: modules that train in full, and the norms of DoRA.
    """
    lost = [name for name, part in adapters.items() if isinstance(part, Mapping) and {"value", "magnitude"} & set(part)]
    if lost:
        raise fail("lora.unmerge: merge does not keep what these had: modules to save, biases, norms of DoRA", *lost,
                   fix="keep the parameters from before merge")  # fmt: skip

    subtract: _Change = lambda w, delta, *_: w - delta.to(w.dtype)  # noqa: E731
    return _changed("lora.unmerge", cfg, params, adapters, of, weight, subtract, False)


def _delta(w: Tensor, factors: Mapping[str, Tensor], leaf: Leaf, scale: float) -> Tensor:
    """Return s A B in the shape of w, in the dtype of the factors; half precision is computed in float32 on a CPU."""
    a, b = (factors[part].to(w.device) for part in ("a", "b"))
    dtype = a.dtype
    if w.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        a, b = a.float(), b.float()
    if leaf.is_summed:
        return (sum_of_factors(leaf, a, b) * scale).to(dtype)
    delta = (b.flatten(1).T.contiguous() @ a.flatten(0, -2).T.contiguous()) * scale  # [out, in]
    return (delta if leaf.layout == "oi" else delta.T).to(dtype).reshape(w.shape)


def _changed(
    verb: str, cfg: Config, params: Any, adapters: Mapping[str, Any], of: Of, weight: float, change: _Change,
    safe: bool,
) -> Any:  # fmt: skip
    """Return the parameters with each adapted leaf changed; with `safe`, refuse those that are not finite."""
    if in_region():
        raise fail(f"{verb}: inside shard_map", fix="call it on placed leaves, outside; inside, use lora.apply")
    check_weight(verb, weight)
    targets = Targets.among(verb, cfg, named_leaves(verb, params), of)
    leaves = checked_leaves(targets, cfg, adapters, (Tensor, Sharded))
    raise_all([e for found in leaves for e in _shape_errors(verb, cfg, found, adapters[found.name])])
    meshes = [x.mesh for _, _, x, _ in leaves if isinstance(x, Sharded)]
    raise_all([_not_mergeable(verb, path, x, bool(meshes))
               for _, path, x, _ in leaves if not isinstance(x, Sharded if meshes else Tensor)])  # fmt: skip
    bases = {name: x for name, _, x, _ in leaves}
    specs = {name: x.spec if isinstance(x, Sharded) else P() for name, x in bases.items()}
    own_specs = {name: {"value": specs[name]} if leaf is None else
                 specs_of(leaf, specs[name], x.ndim, cfg.dora, "specs") for name, _, x, leaf in leaves}  # fmt: skip

    def step(bases: Any, local: Any) -> Any:
        out, wrong = {}, {}
        for name, _, _, leaf in leaves:
            w, spec = bases[name], specs[name]
            if leaf is None:
                out[name] = local[name]["value"].to(w.dtype, copy=True)
            else:
                inputs, _ = leaf.split(spec.parts(w.ndim))
                axes = tuple(a for group in inputs for a in group)
                delta = _delta(w, local[name], leaf, cfg.scale_of(leaf.module) * weight)
                out[name] = change(w, delta, local[name], leaf, axes)
            if safe:
                wrong[name] = psum((~out[name].isfinite()).sum(), spec.axes or None)
        return out, wrong

    factors = {name: adapters[name] for name in bases}
    if meshes:
        step = shard_map(step, mesh=meshes[0], in_specs=(specs, own_specs), out_specs=(specs, P()))
        are_placed = all(isinstance(x, Sharded) for x in tree.leaves(factors))
        factors = reshard(factors, own_specs) if are_placed else device_put(factors, own_specs, meshes[0])
    new, wrong = step(bases, factors)
    has_values = not meshes or meshes[0].kind != "abstract"
    raise_all([fail(f"{verb}: {tree.show('params', path)} would not be finite", f"{int(wrong[name])} elements",
                    fix="look for what made the adapter diverge; safe=False merges it anyway")
               for name, path, _, _ in leaves if safe and has_values and int(wrong[name])])  # fmt: skip
    return targets.replaced(params, new)


def _not_mergeable(verb: str, path: tree.Path, x: Any, placed: bool) -> ShardingError:
    """Return the error of a leaf that has no values, or is placed unlike the others."""
    fix = "place all leaves on one mesh, or none" if isinstance(x, Tensor) else "fs.materialize it"
    if isinstance(x, Int8):
        fix = "lora.dequantize(params)"
    words = "a Sharded, as others are" if placed else "a Sharded or a Tensor"
    return must_be(f"{verb}: {tree.show('params', path)}", words, x, fix=fix)


def _shape_errors(verb: str, cfg: Config, found: Adapted, tensors: Mapping[str, Any]) -> list[ShardingError]:
    """Return the errors of tensors whose global shapes do not fit their leaf."""
    shape, leaf = tuple(found.base.shape), found.leaf
    wanted = {"value": shape} if leaf is None else factor_shapes(cfg, leaf, shape)
    rank = None if leaf is None else cfg.rank_of(leaf.module)
    return [another_shape(f"{verb}: adapters[{found.name!r}]", part, x, found.base, rank)
            for part, x in tensors.items() if tuple(x.shape) != wanted[part]]  # fmt: skip

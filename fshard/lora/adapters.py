"""Described adapters and their specs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import init as initial
from fshard._core.weight import Leaf
from fshard.errors import ShardingError, checked, fail, raise_all, shown
from fshard.init import Deferred
from fshard.sharded import key_of
from fshard.spec import Box, full_box

from .config import Config
from .targets import Of, Targets, factor_shapes, named_leaves, specs_of


@dataclass(frozen=True)
class _OfBase:
    """Copies a leaf, or the norms of its outputs' weights, by the leaf's initializer and key."""

    base: Deferred
    key: Tensor | None  # of the base's tree, folded with the leaf's name
    name: str
    norms_of: Leaf | None = None

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.norms_of is None:
            return self._base(box, dtype, device)
        inputs, _ = self.norms_of.split(full_box(self.base.shape))
        both = (*box, *inputs) if self.norms_of.layout == "oi" else (*inputs, *box)
        part = self._base(both, self.base.dtype, device).to(dtype)
        dims, _ = self.norms_of.split(tuple(range(part.ndim)))
        norms: Tensor = torch.linalg.vector_norm(part, dim=dims)
        return norms

    def _base(self, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            return self.base.init.fill(self.key, self.base.shape, box, dtype, device)  # type: ignore[arg-type]
        except ShardingError as e:
            if self.key is not None or "key must be" not in str(e):
                raise
            raise fail(f"lora.init: params[{self.name!r}] is drawn, and its adapter begins with its values",
                       fix="lora.init(..., key=): the key that params is materialized with") from e  # fmt: skip

    def describe(self) -> str:
        return f"{'copy' if self.norms_of is None else 'norms'}({self.name})"


@checked
def init(cfg: Config, params: Any, *, of: Of = None, key: Tensor | None = None) -> dict[str, dict[str, Any]]:
    """Describe the adapters of a parameter tree: {dotted path of a leaf: {"a", "b"[, "magnitude"]}}, in float32.

        a [in.., r], b [r, out..], magnitude [out..], for a matrix [in.., out..]; a module to save, or a bias: {"value"}

    `params` has any leaves with a `.shape`: described, placed or tensors. A magnitude, and the copy of a module to
    save, begin with the values of the base, and so need described leaves, or tensors.

    Args:
        of: the names of leaves, and which are matrices: `llama.theirs` for `fs.models.llama`; the function that
            `fs.defer` returned for its tree; without it leaves of two dims are matrices [in, out], named by their path.
        key: that with which `params` is materialized; needed only for magnitudes and copies of leaves that are drawn,
            not read from files.

    >>> adapters = fs.lora.init(fs.lora.Config(["up"], rank=2), {"up": fs.init.zeros((4, 6)), "down": fs.init.zeros(4)})
    >>> adapters["up"]
    {'a': f32[4, 2] = uniform(low=-0.5, high=0.5), 'b': f32[2, 6] = zeros}

    Raises ShardingError listing targets that name no module, with names like them, and targets that are not matrices.
    """
    targets = Targets.among("lora.init", cfg, named_leaves("lora.init", params), of)
    out = {name: _factors(cfg, leaf, tuple(x.shape)) for name, (leaf, x) in targets.adapted.items()}
    errors: list[ShardingError] = []
    rows: list[tuple[str, Any, Leaf | None]] = [(name, x, None) for name, x in targets.copied.items()]
    rows += [(name, x, leaf) for name, (leaf, x) in targets.adapted.items() if cfg.dora]
    for name, x, leaf in rows:
        part = "value" if leaf is None else "magnitude"
        if isinstance(x, Deferred):
            leaf_key = None if key is None else key_of(x, targets.named[name][0], key)
            shape, dtype = (x.shape, x.dtype) if leaf is None else (leaf.split(x.shape)[1], torch.float32)
            made: Any = Deferred(shape, dtype, _OfBase(x, leaf_key, name, leaf))
        elif isinstance(x, Tensor):
            dims = () if leaf is None else leaf.split(tuple(range(x.ndim)))[0]
            made = x.detach().clone() if leaf is None else torch.linalg.vector_norm(x.detach().float(), dim=dims)
        else:
            errors.append(fail(f"lora.init: {part} of params[{name!r}] begins with its values, and it is {shown(x)}",
                               fix="pass the described tree, before fs.materialize"))  # fmt: skip
            continue
        out.setdefault(name, {})[part] = made
    raise_all(errors)
    return out


def _factors(cfg: Config, leaf: Leaf, shape: tuple[int, ...]) -> dict[str, Deferred]:
    parts = factor_shapes(cfg, leaf, shape)
    a, b = parts["a"], parts["b"]
    r, bound = b[0], 1 / math.sqrt(max(1, math.prod(a[-2:-1] if leaf.is_summed else a[:-1])))
    table, random = leaf.layout == "table", cfg.init == "random"
    if table:
        return {"a": initial.normal(a) if random else initial.zeros(a), "b": initial.normal(b)}
    drawn = initial.normal(a, std=1 / r) if cfg.init == "gaussian" else initial.uniform(a, low=-bound, high=bound)
    end = 1 / math.sqrt(r)
    return {"a": drawn, "b": initial.uniform(b, low=-end, high=end) if random else initial.zeros(b)}


@checked
def specs(cfg: Config, params: Any, specs: Any, *, of: Of = None) -> dict[str, dict[str, Any]]:
    """Return the specs of the adapters of `init`, by the specs of their bases, on the same axes: P() replicates them.

        w [in@data, out@model]  ->  a [in@data, r], b [r, out@model]

    `specs` may be a prefix of `params`. `fs.fully_shard(lora.specs(...), adapters, axis="data")` splits the others too.

    >>> described = {"up": fs.init.zeros((4, 6))}
    >>> fs.lora.specs(fs.lora.Config(["up"]), described, {"up": P(None, "model")})
    {'up': {'a': P(), 'b': P(None, 'model')}}
    """
    targets = Targets.among("lora.specs", cfg, named_leaves("lora.specs", params), of)
    by_name = targets.specs(params, specs)
    out = {name: specs_of(leaf, by_name[name], x.ndim, cfg.dora, f"lora.specs: specs of {name!r}")
           for name, (leaf, x) in targets.adapted.items()}  # fmt: skip
    return {**out, **{name: {"value": by_name[name]} for name in targets.copied}}

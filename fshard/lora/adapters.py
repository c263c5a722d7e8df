"""Described adapters and their specs."""

from __future__ import annotations

import math
from typing import Any

from fshard import init as initial
from fshard import tree
from fshard.errors import checked
from fshard.init import Deferred
from fshard.spec import is_spec
from fshard.weight import is_weight

from .config import Config
from .targets import Leaf, Of, Targets, specs_of


@checked
def init(cfg: Config, params: Any, *, of: Of = None) -> dict[str, dict[str, Any]]:
    """Describe the adapters of a parameter tree: {dotted path of a leaf: {"a", "b"[, "magnitude"]}}, in float32.

        a [in.., r], b [r, out..], magnitude [out..], for a matrix [in.., out..]; a module to save, or a bias: {"value"}

    `params` has any leaves with a `.shape`: described, placed or tensors. A magnitude, and the copy of a module to
    save, begin as those of the base, and so need described leaves.

    Args:
        of: the names of leaves, and which are matrices: `llama.theirs` for `fs.models.llama`; the function that
            `fs.defer` returned for its tree; without it leaves of two dims are matrices [in, out], named by their path.

    >>> adapters = fs.lora.init(fs.lora.Config(["up"], rank=2), {"up": fs.init.zeros((4, 6)), "down": fs.init.zeros(4)})
    >>> adapters["up"]
    {'a': f32[4, 2] = uniform(low=-0.5, high=0.5), 'b': f32[2, 6] = zeros}

    Raises ShardingError listing targets that name no module, with names like them, and targets that are no matrix.
    """
    targets = Targets.of("lora.init", cfg, params, of)
    return {name: _factors(cfg, leaf, tuple(x.shape)) for name, (leaf, x) in targets.adapted.items()}


def _factors(cfg: Config, leaf: Leaf, shape: tuple[int, ...]) -> dict[str, Deferred]:
    inputs, outputs = leaf.split(shape)
    r, bound = cfg.rank_of(leaf.module), 1 / math.sqrt(max(1, math.prod(inputs)))
    a, b = (*inputs, r), (r, *outputs)
    table, random = leaf.layout == "table", cfg.init == "random"
    if table:
        return {"a": initial.normal(a) if random else initial.zeros(a), "b": initial.normal(b)}
    drawn = initial.normal(a, std=1 / r) if cfg.init == "gaussian" else initial.uniform(a, low=-bound, high=bound)
    end = 1 / math.sqrt(r)
    return {"a": drawn, "b": initial.uniform(b, low=-end, high=end) if random else initial.zeros(b)}


@checked
def specs(cfg: Config, params: Any, specs: Any, *, of: Of = None) -> dict[str, dict[str, Any]]:
    """Return the specs of the adapters of `init`, by those of their bases, on the same axes: P() replicates them.

        w [in@data, out@model]  ->  a [in@data, r], b [r, out@model]

    `specs` may be a prefix of `params`. `fs.fully_shard(lora.specs(...), adapters, axis="data")` splits the others too.

    >>> described = {"up": fs.init.zeros((4, 6))}
    >>> fs.lora.specs(fs.lora.Config(["up"]), described, {"up": P(None, "model")})
    {'up': {'a': P(), 'b': P(None, 'model')}}
    """
    targets = Targets.of("lora.specs", cfg, params, of)
    names = [tree.dotted(path) for path, _ in tree.leaves_with_path(params, is_weight)]
    flat = dict(zip(names, tree.broadcast(specs, params, name="specs", leaf=is_spec, is_leaf=is_weight), strict=True))
    out = {}
    for name, (leaf, x) in targets.adapted.items():
        parts = specs_of(leaf, flat[name], x.ndim)
        out[name] = parts if cfg.dora else {part: parts[part] for part in ("a", "b")}
    return {**out, **{name: {"value": flat[name]} for name in targets.copied}}

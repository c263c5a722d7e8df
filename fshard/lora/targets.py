"""The leaves of a tree that a `Config` names: which are matrices, and which of their dims are inputs."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fshard import tree
from fshard.errors import ShardingError, fail, must_be, raise_all
from fshard.spec import P
from fshard.weight import is_weight

from .config import ALL_LINEAR, Config, in_module, names_module

# Heads, which "all-linear" leaves out: of language models, and of classifiers.
_HEADS = ("lm_head", "embed_out", "score", "classifier")
_PARTS = ("weight", "bias", "w", "b")


@dataclass(frozen=True)
class Leaf:
    """A leaf as adapters see it: its module, its name there, and, of a matrix, its layout.

    Attributes:
        module: the dotted name of the module, of which targets are matched.
        part: "weight", "bias", or another name.
        layout: "io" for a matrix [in.., out..], "oi" for one [out, in], "table" for embeddings [in, out] that are
            looked up; None for a leaf that is no matrix.
        inputs: the number of input dims.
        why: the reason why it is no matrix.
    """

    module: str
    part: str
    layout: Literal["io", "oi", "table"] | None = None
    inputs: int = 1
    why: str = ""

    def split(self, entries: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split one entry for each dim of the leaf into those of inputs and those of outputs."""
        first, second = entries[: self.inputs], entries[self.inputs :]
        return (second, first) if self.layout == "oi" else (first, second)


# A model's `theirs`, from paths to tensors in files; or the function of `fs.defer`; or None.
Of = Callable[..., Any] | None


def leaf_of(of: Of, path: tree.Path, ndim: int) -> Leaf:
    """Describe the leaf of `ndim` dims at a path.

    `of` is the `theirs` of a model in `fs.models`, where a linear layer's matrix is named "w" and any other is a table;
    or the function that `fs.defer` returned, which knows the submodules; or None: each leaf of two dims is a matrix.
    """
    if of is None:
        parts = [str(p) for p in path]
        part = parts.pop() if parts and parts[-1] in _PARTS else "weight"
        name = ".".join(parts) or part
        return Leaf(name, part, "io") if ndim == 2 else Leaf(name, part, why=f"it has {ndim} dims")
    if hasattr(of, "module_leaf"):
        found: Leaf = of.module_leaf(path, ndim)
        return found
    tensor = of(path)
    module, _, part = str(tensor.name).rpartition(".")
    if part not in _PARTS:
        return Leaf(tensor.name, part, why="it is no parameter of a linear layer")
    if "router" in path:
        return Leaf(module, part, why="it is a router")
    if "*" in tensor.name:
        return Leaf(module, part, why="it is a stack of matrices, [experts, ...]")
    if part == "bias" or ndim < 2:
        return Leaf(module, part, why="it is a vector")
    if tensor.at:
        return Leaf(module, part, why=f"it is a part of {tensor.name}")
    if path[-1] != "w":
        return Leaf(module, part, "table") if ndim == 2 else Leaf(module, part, why=f"it is a table of {ndim} dims")
    origins = tensor.pattern(ndim).origins
    inputs = next((i for i, dim in enumerate(origins) if dim != origins[0]), ndim)
    if sorted(set(origins)) != [0, 1] or len(set(origins[inputs:])) != 1:
        return Leaf(module, part, why=f"its dims are not [in.., out..] of a matrix: {tensor.dims}")
    return Leaf(module, part, "io", inputs)


class Targets(NamedTuple):
    """The leaves of a tree that take part in an adapter, by dotted path."""

    adapted: dict[str, tuple[Leaf, Any]]
    copied: dict[str, Any]  # biases and modules that train in full

    @staticmethod
    def of(verb: str, cfg: Config, params: Any, of: Of) -> Targets:
        """Find the leaves. Raises ShardingError for targets that no leaf has, and for those that are no matrix."""
        rows = [(name, path, leaf_of(of, path, x.ndim), x) for name, (path, x) in named_leaves(verb, params).items()]
        saved = {name: x for name, _, leaf, x in rows if any(in_module(m, leaf.module) for m in cfg.modules_to_save)}
        adapted: dict[str, tuple[Leaf, Any]] = {}
        errors: list[ShardingError] = []
        for name, path, leaf, x in rows:
            if name in saved or leaf.part in ("bias", "b") or not is_target(cfg, leaf):
                continue
            adapted[name] = leaf, x
            if leaf.layout is None:
                errors.append(fail(f"{verb}: {tree.show('params', path)} is a target and no matrix: {leaf.why}",
                                   fix="name other targets, or exclude it", module=leaf.module))  # fmt: skip
        errors += _unmatched(verb, cfg, [leaf for _, _, leaf, _ in rows], adapted)
        raise_all(errors)
        modules = {leaf.module for leaf, _ in adapted.values()}
        biases = {name: x for name, _, leaf, x in rows if leaf.part in ("bias", "b") and
                  (cfg.bias == "all" or (cfg.bias == "lora_only" and leaf.module in modules))}  # fmt: skip
        return Targets(adapted, {**saved, **biases})


def is_target(cfg: Config, leaf: Leaf) -> bool:
    """Return whether a config adapts the matrix of a module."""
    name, targets = leaf.module, cfg.targets
    if isinstance(cfg.exclude, str):
        excluded = bool(cfg.exclude) and re.fullmatch(cfg.exclude, name) is not None
    else:
        excluded = any(names_module(one, name) for one in cfg.exclude)
    if excluded:
        return False
    if targets == ALL_LINEAR:
        is_linear = leaf.layout in ("io", "oi") and leaf.part in ("weight", "w")
        return is_linear and name.rpartition(".")[2] not in _HEADS
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(names_module(one, name) for one in targets)


def _unmatched(
    verb: str, cfg: Config, leaves: list[Leaf], adapted: Mapping[str, tuple[Leaf, Any]]
) -> list[ShardingError]:
    """Return the errors of targets, and of modules to save, that name nothing."""
    modules = sorted({leaf.module for leaf in leaves})
    matrices = sorted({leaf.module for leaf in leaves if leaf.layout})
    if isinstance(cfg.targets, str):
        found = any(is_target(replace(cfg, exclude=()), leaf) for leaf in leaves)
        missing = [] if found else [("targets", cfg.targets)]
    else:
        missing = [("targets", one) for one in cfg.targets if not any(names_module(one, m) for m in modules)]
    if not adapted and not missing:
        return [fail(f"{verb}: every target is excluded, or a module to save", targets=cfg.targets, exclude=cfg.exclude,
                     modules_to_save=cfg.modules_to_save, fix="a narrower exclude")]  # fmt: skip
    missing += [("modules_to_save", one) for one in cfg.modules_to_save
                if not any(in_module(one, m) for m in modules)]  # fmt: skip
    return [fail(f"{verb}: {option}: no module is named {one!r}", near=", ".join(near(one, matrices)),
                 fix="one of these, by its last parts or in full") for option, one in missing]  # fmt: skip


def near(name: str, modules: list[str]) -> list[str]:
    """Return the names most like a name: their last parts, of any block."""
    parts = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", m) for m in modules)
    ends = {m: ".".join(m.split(".")[-1 - name.count(".") :]) for m in parts}
    close = difflib.get_close_matches(name, list(dict.fromkeys(ends.values())), 4, 0.0)
    return [next(m for m, end in ends.items() if end == c) for c in close]


def specs_of(leaf: Leaf, spec: P, ndim: int, label: str) -> dict[str, P]:
    """Return the specs of the factors that lie as their base does: a as its inputs, b as its outputs."""
    inputs, outputs = leaf.split(tuple(axes or None for axes in parts_of(label, spec, ndim)))
    return {"a": P(*inputs), "b": P(None, *outputs), "magnitude": P(*outputs)}


def parts_of(label: str, spec: P, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dim. Raises ShardingError, naming the spec's `label`, for a spec of more dims."""
    try:
        return spec.parts(ndim)
    except ShardingError as e:
        raise ShardingError(f"{label}: {e}") from None


class Adapted(NamedTuple):
    """A leaf of the parameters that has an adapter."""

    name: str  # the dotted path
    path: tree.Path
    base: Any
    leaf: Leaf | None  # None for a leaf that is replaced


def named_leaves(verb: str, params: Any) -> dict[str, tuple[tree.Path, Any]]:
    """Return the path and the leaf by each dotted path, in the order of the leaves; a Weight is one leaf."""
    rows = tree.leaves_with_path(params, is_weight)
    raise_all([must_be(f"{verb}: {tree.show('params', path)}", "a leaf with a shape", x)
               for path, x in rows if not hasattr(x, "ndim")])  # fmt: skip
    return {".".join([str(p) for p in path]): (path, x) for path, x in rows}


def checked_leaves(
    verb: str, cfg: Config, named: Mapping[str, tuple[tree.Path, Any]], adapters: Mapping[str, Mapping[str, Any]],
    of: Of,
) -> list[Adapted]:  # fmt: skip
    """Return the leaves that have an adapter.

    Raises ShardingError listing every adapter of no leaf, and of tensors that are not those of its leaf.
    """
    errors: list[ShardingError] = []
    out: list[Adapted] = []
    wanted = {"a", "b", "magnitude"} if cfg.dora else {"a", "b"}
    for name, own in adapters.items():
        label = f"{verb}: adapters[{name!r}]"
        if name not in named:
            like = ", ".join(difflib.get_close_matches(name, named, 3, 0.0))
            errors.append(fail(f"{label}: params has no leaf {name!r}", near=like, fix="pass the params of lora.init"))
            continue
        path, x = named[name]
        if not isinstance(own, Mapping) or not all(hasattr(t, "shape") for t in own.values()):
            errors.append(must_be(label, "a dict of tensors", own, fix="what lora.init, or fs.peft.load, returned"))
        elif set(own) == {"value"}:
            out.append(Adapted(name, path, x, None))
            if len(own["value"].shape) != x.ndim:
                errors.append(another_shape(label, "value", own["value"], x))
        elif set(own) != wanted:
            errors.append(fail(f"{label}: has {sorted(own)}, not {sorted(wanted)}",
                               fix=f"the config with which it was made: this one has dora={cfg.dora}"))  # fmt: skip
        else:
            leaf = leaf_of(of, path, x.ndim)
            if leaf.layout is None:
                errors.append(fail(f"{label}: the leaf is no matrix: {leaf.why}", fix="pass the `of` of lora.init"))
                continue
            out.append(Adapted(name, path, x, leaf))
            outputs = x.ndim - leaf.inputs
            for part, ndim in (("a", leaf.inputs + 1), ("b", outputs + 1), ("magnitude", outputs)):
                if part in own and len(own[part].shape) != ndim:
                    errors.append(another_shape(label, part, own[part], x))
    raise_all(errors)
    return out


def check_weight(verb: str, weight: float) -> None:
    """Raise ShardingError for a weight that is not finite."""
    if not math.isfinite(weight):
        raise fail(f"{verb}: weight={weight}", fix="a finite number")


def another_shape(label: str, part: str, got: Any, base: Any, rank: int | None = None) -> ShardingError:
    of_rank = "" if rank is None else f", and of rank {rank}"
    return fail(f"{label}[{part!r}] is {list(got.shape)}, of a leaf {list(base.shape)}{of_rank}",
                "a is [in.., r], b [r, out..], magnitude [out..]",
                fix="pass the config, and the `of`, of lora.init")  # fmt: skip

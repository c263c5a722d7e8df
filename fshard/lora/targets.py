"""The leaves of a tree that a `Config` names: which are matrices, and which of their dims are inputs."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fshard import tree
from fshard._core.weight import Leaf, is_weight
from fshard.errors import ShardingError, fail, must_be, raise_all
from fshard.spec import P, is_spec

from .config import ALL_LINEAR, Config, module_names, without_module

# Heads, which "all-linear" leaves out: of language models, and of classifiers.
HEADS = ("lm_head", "embed_out", "score", "classifier")
_MOST_MISSING = 20  # entries in one error: the search for near names takes time
_PARTS = ("weight", "bias", "w", "b")


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
        return Leaf(tensor.name, part, why="it is not a parameter of a linear layer")
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

    verb: str  # of errors
    named: Mapping[str, tuple[tree.Path, Any]]  # all leaves
    adapted: dict[str, tuple[Leaf, Any]]
    copied: dict[str, Any]  # biases and modules that train in full

    @staticmethod
    def among(verb: str, cfg: Config, named: Mapping[str, tuple[tree.Path, Any]], of: Of) -> Targets:
        """Find them among the leaves of `named_leaves`."""
        adapted, copied = _chosen(verb, cfg, of, tuple([(path, x.ndim) for path, x in named.values()]))
        return Targets(verb, named, {name: (leaf, named[name][1]) for name, leaf in adapted.items()},
                       {name: named[name][1] for name in copied})  # fmt: skip

    def specs(self, params: Any, specs: Any) -> dict[str, P]:
        """Return the spec of each leaf of the tree; `specs` may be a prefix."""
        flat = tree.broadcast(specs, params, name=f"{self.verb}: specs", leaf=is_spec, is_leaf=is_weight)
        return dict(zip(self.named, flat, strict=True))

    def replaced(self, params: Any, new: Mapping[str, Any]) -> Any:
        """Return the tree with new leaves."""
        leaves = [new.get(name, x) for name, (_, x) in self.named.items()]
        return tree.unflatten(tree.flatten(params, is_weight)[1], leaves)


@functools.lru_cache(maxsize=32)  # `apply` asks in every step
def _chosen(
    verb: str, cfg: Config, of: Of, leaves: tuple[tuple[tree.Path, int], ...]
) -> tuple[dict[str, Leaf], tuple[str, ...]]:
    """Return the adapted leaves, and the names of the copied ones, of a tree of leaves of these paths and dims."""
    rows = [(tree.dotted(path), path, _summed(cfg, of, leaf_of(of, path, ndim), ndim)) for path, ndim in leaves]
    saved = [name for name, _, leaf in rows if module_names(tuple(cfg.modules_to_save)).contain(leaf.module)]
    adapted: dict[str, Leaf] = {}
    errors: list[ShardingError] = []
    for name, path, leaf in rows:
        if name in saved or not (leaf.is_summed or (leaf.part not in ("bias", "b") and is_target(cfg, leaf))):
            continue
        adapted[name] = leaf
        if leaf.layout is None:
            errors.append(fail(f"{verb}: {tree.show('params', path)} is a target and no matrix: {leaf.why}",
                               fix="name other targets, or exclude it", module=leaf.module))  # fmt: skip
    errors += _unmatched(verb, cfg, [leaf for _, _, leaf in rows], adapted)
    raise_all(errors)
    modules = {leaf.module for leaf in adapted.values()}
    biases = [name for name, _, leaf in rows if leaf.part in ("bias", "b") and
              (cfg.bias == "all" or (cfg.bias == "lora_only" and leaf.module in modules))]  # fmt: skip
    return adapted, tuple(dict.fromkeys([*saved, *biases]))


def _summed(cfg: Config, of: Of, leaf: Leaf, ndim: int) -> Leaf:
    """Return a leaf of `cfg.parameters` as one that an adapter is added to, by its full name; others unchanged."""
    name = leaf.module if of is None else f"{leaf.module}.{leaf.part}"
    if not cfg.parameters or ndim not in (2, 3) or not module_names(tuple(cfg.parameters)).name(name):
        return leaf
    module = getattr(of, "module", None)
    inputs_first = module is None or (ndim == 3 and getattr(module.get_submodule(leaf.module), "is_transposed", False))
    return Leaf(name, "", "sum_io" if inputs_first else "sum_oi")


def is_target(cfg: Config, leaf: Leaf) -> bool:
    name, targets = leaf.module, cfg.targets
    if isinstance(cfg.exclude, str):
        excluded = bool(cfg.exclude) and re.fullmatch(cfg.exclude, name) is not None
    else:
        excluded = module_names(tuple(cfg.exclude)).name(name)
    if excluded:
        return False
    if targets == ALL_LINEAR:
        is_linear = leaf.layout in ("io", "oi") and leaf.part in ("weight", "w")
        return is_linear and name.rpartition(".")[2] not in HEADS
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return module_names(tuple(targets)).name(name)


def _unmatched(verb: str, cfg: Config, leaves: list[Leaf], adapted: Mapping[str, Leaf]) -> list[ShardingError]:
    """Return the errors of targets, and of modules to save, that name nothing."""
    modules = sorted({leaf.module for leaf in leaves})
    matrices = sorted({leaf.module for leaf in leaves if leaf.layout})
    if isinstance(cfg.targets, str):
        found = any(is_target(replace(cfg, exclude=()), leaf) for leaf in leaves)
        missing = [] if found else [("targets", cfg.targets)]
    else:
        missing = [("targets", one) for one in without_module(cfg.targets, modules)]
    summed = [leaf.module for leaf in leaves if leaf.is_summed]
    missing += [("parameters", one) for one in without_module(cfg.parameters, summed)]
    if not adapted and not missing:
        return [fail(f"{verb}: every target is excluded, or a module to save", targets=cfg.targets, exclude=cfg.exclude,
                     modules_to_save=cfg.modules_to_save, fix="a narrower exclude")]  # fmt: skip
    missing += [("modules_to_save", one) for one in without_module(cfg.modules_to_save, modules, inside=True)]
    errors = [fail(f"{verb}: {option}: no module is named {one!r}", near=", ".join(near(one, matrices)),
                   fix="one of these, by its last parts or in full")
              for option, one in missing[:_MOST_MISSING]]  # fmt: skip
    more = len(missing) - _MOST_MISSING
    return errors if more <= 0 else [*errors, fail(f"{verb}: {more} more entries name no module")]


def near(name: str, modules: list[str]) -> list[str]:
    """Return the names most like a name: their last parts, of any block."""
    parts = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", m) for m in modules)
    ends = {m: ".".join(m.split(".")[-1 - name.count(".") :]) for m in parts}
    close = difflib.get_close_matches(name, list(dict.fromkeys(ends.values())), 4, 0.0)
    return [next(m for m, end in ends.items() if end == c) for c in close]


def specs_of(leaf: Leaf, spec: P, ndim: int, dora: bool, label: str) -> dict[str, P]:
    """Return the specs of factors that are placed like their base: a as its inputs, b as its outputs."""
    parts = by_part(leaf, parts_of(label, spec, ndim), None, dora)
    return {part: spec.with_entries(*entries, memory="device") for part, entries in parts.items()}


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
    out = {".".join([str(p) for p in path]): (path, x) for path, x in rows}
    if len(out) < len(rows):
        both = next(path for path, _ in rows if out[tree.dotted(path)][0] != path)
        raise fail(f"{verb}: {tree.show('params', both)} and {tree.show('params', out[tree.dotted(both)][0])} have one "
                   f"dotted path, {tree.dotted(both)!r}", fix="rename one")  # fmt: skip
    return out


def checked_leaves(
    targets: Targets, cfg: Config, adapters: Mapping[str, Mapping[str, Any]], kinds: tuple[type, ...]
) -> list[Adapted]:
    """Return the leaves that have an adapter, whose leaves are of these `kinds`. Raise what `check_adapters` raises."""
    wanted = {name: {part: len(shape) for part, shape in factor_shapes(cfg, leaf, tuple(x.shape)).items()}
              for name, (leaf, x) in targets.adapted.items()}  # fmt: skip
    check_adapters(targets, adapters, wanted, kinds, config=f": this one has dora={cfg.dora}")
    return [Adapted(name, *targets.named[name], targets.adapted.get(name, (None,))[0]) for name in adapters]


def factor_shapes(cfg: Config, leaf: Leaf, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors of a leaf."""
    return by_part(leaf, shape, cfg.rank_of(leaf.module), cfg.dora)


def by_part(leaf: Leaf, entries: tuple[Any, ...], rank: Any, dora: bool) -> dict[str, tuple[Any, ...]]:
    """Split one entry for each dim of a leaf: a [in.., r], b [r, out..], and with DoRA magnitude [out..]."""
    inputs, outputs = leaf.split(entries)
    return {"a": (*inputs, rank), "b": (rank, *outputs), **({"magnitude": outputs} if dora else {})}


def check_adapters(
    targets: Targets, adapters: Mapping[str, Any], wanted: Mapping[str, Mapping[str, int]], kinds: tuple[type, ...],
    config: str = "",
) -> None:  # fmt: skip
    """Raise ShardingError, listing every adapter that is missing, of no leaf, or whose tensors do not fit its leaf.

    `wanted` has the number of dims of each tensor of the adapted leaves.
    """
    verb, named = targets.verb, targets.named
    module, words = verb.partition(".")[0], " or ".join(kind.__name__ for kind in kinds)
    wanted = {**wanted, **{name: {"value": x.ndim} for name, x in targets.copied.items()}}
    errors = [fail(f"{verb}: adapters[{name!r}] is missing",
                   fix=f"what {module}.init, or fs.peft.load, returned for cfg")
              for name in wanted if name not in adapters]  # fmt: skip
    for name, parts in adapters.items():
        label = f"{verb}: adapters[{name!r}]"
        if name not in named:
            like = ", ".join(difflib.get_close_matches(name, named, 3, 0.0))
            errors.append(fail(f"{label}: params has no leaf {name!r}", near=like,
                               fix=f"pass the params of {module}.init"))  # fmt: skip
        elif not isinstance(parts, Mapping) or not all(isinstance(t, kinds) for t in parts.values()):
            tensors = parts.values() if isinstance(parts, Mapping) else ()
            got = next((t for t in tensors if not isinstance(t, kinds)), parts)
            errors.append(must_be(label, f"a dict of {words} leaves", got,
                                  fix=f"materialize what {module}.init returned"))  # fmt: skip
        elif name not in wanted:
            errors.append(fail(f"{label}: cfg does not adapt this leaf", fix=f"pass the config of {module}.init"))
        elif parts.keys() != wanted[name].keys():
            errors.append(fail(f"{label}: has {sorted(parts)}, not {sorted(wanted[name])}",
                               fix=f"the config with which it was made{config}"))  # fmt: skip
        else:
            errors += [another_shape(label, part, x, named[name][1]) for part, x in parts.items()
                       if x.ndim != wanted[name][part]]  # fmt: skip
    raise_all(errors)


def another_shape(label: str, part: str, got: Any, base: Any, rank: int | None = None) -> ShardingError:
    of_rank = "" if rank is None else f", and of rank {rank}"
    expected = "scale is [out..], or [in..] of the feed-forward" if part == "scale" else \
        "a is [in.., r], b [r, out..], magnitude [out..]"  # fmt: skip
    module = label.partition(".")[0]
    return fail(f"{label}[{part!r}] is {list(got.shape)}, of a leaf {list(base.shape)}{of_rank}", expected,
                fix=f"pass the config, and the `of`, of {module}.init")  # fmt: skip

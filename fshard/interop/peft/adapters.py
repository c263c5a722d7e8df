"""Adapters of a parameter tree, `fs.lora` and `fs.ia3`, in the files of PEFT, by slices, from and to any mesh.

leaf here                       file: base_model.model.MODULE.
["h.0.q.w"]["a"]  [in.., r]     lora_A.weight [r, in], of a table lora_embedding_A
["h.0.q.w"]["b"]  [r, out..]    lora_B.weight [out, r], of a table lora_embedding_B
["h.0.q.w"]["magnitude"]        lora_magnitude_vector [out]
["head.w"]["value"]             weight; of the bias of an adapted module base_layer.bias
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from fshard import lora, tree
from fshard._core.files.io import StrPath
from fshard._core.weight import Leaf
from fshard.errors import checked, fail, raise_all
from fshard.init import Deferred, zeros
from fshard.interop.hf import FileTensor, WeightHeaders, config_of, read
from fshard.interop.hf.export import Contents, write_files
from fshard.interop.hf.layout import check_described, output_tensors
from fshard.interop.hf.weights import with_dot
from fshard.lora import ia3
from fshard.lora.config import module_names, value_for, without_module
from fshard.lora.targets import HEADS, Of, Targets, factor_shapes, leaf_of, named_leaves

from .config import KEPT, config_fields, only, saves, selects
from .files import CONFIG, WEIGHTS, check_folder, config_file, plain

_START = "base_model.model."
# Tables of tokens; a model that has one of `HEADS` is not tied.
_TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "shared")
# What PEFT writes twice if all biases train, and so does a head.
_WRITTEN_TWICE = (".modules_to_save.bias", ".original_module.bias")
_KEYS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_TABLE_KEYS = {"a": "lora_embedding_A", "b": "lora_embedding_B", "magnitude": "lora_magnitude_vector"}
Config = lora.Config | ia3.Config
Adapters = Mapping[str, Mapping[str, Any]]
Leaves = dict[str, tuple[tree.Path, Leaf]]  # the path and the description of each leaf, by dotted path


@checked
def load(
    folder: StrPath, params: Any, *, of: Of = None, prefix: str = "", ignored: Sequence[str] = ()
) -> tuple[Config, dict[str, dict[str, Any]]]:
    """Return the config and the described adapters of a folder that PEFT wrote; each rank will read only its bytes.

    This reads one folder; each adapter of a model has another. Dtypes are the file's.
    Of a config without `target_modules` the targets are PEFT's for the type of the model.

    Args:
        params: the tree that is adapted: any leaves with a shape.
        of: the names of its leaves, as for `lora.init`.
        prefix: of the names of modules, which those in the folder may lack: `"bert."`, for adapters of a base model
            without a head.
        ignored: ends of the names of tensors that are not read. Nor is the frozen table, `.base_layer.weight`, that
            PEFT writes next to an adapter of some embeddings: `params` has it.

    >>> cfg, adapters = fs.peft.load("my-adapters", params, of=gpt2.theirs)
    >>> adapters["h.0.qkv.w"]["a"]
    f32[16, 2] = stored(adapter_model.safetensors: base_model.model.transformer.h.0.attn.c_attn.lora_A.weight)

    Raises ShardingError, before any value is read, listing every field of the config that is not supported, and every
    tensor that is missing, extra, cut short or of another shape.
    """
    path = check_folder(folder)
    prefix = with_dot(prefix)
    leaves = _leaves(params, of)
    modules = list(dict.fromkeys(leaf.module for _, leaf in leaves.values()))
    names = [name.removeprefix(prefix) for name in modules]
    kind = getattr(getattr(getattr(of, "module", None), "config", None), "model_type", None)
    kind = kind or getattr(of, "model_type", None)  # of `t5.theirs`
    kind = kind or str(getattr(of, "__module__", "")).rpartition(".")[2]
    contents = config_of(path, CONFIG)
    fields = config_fields(path / CONFIG, contents, names, model_type=kind, prefix=prefix)
    if not isinstance(fields["targets"], str):  # a list may have names that this model lacks, if it has some
        missing = set(without_module(fields["targets"], modules))
        fields["targets"] = tuple(t for t in fields["targets"] if t not in missing) or fields["targets"]
    fields["modules_to_save"] = _saved(fields["modules_to_save"], dict(zip(names, modules, strict=True)))
    if not fields["targets"] and not fields.get("parameters"):
        raise fail(f"{path / CONFIG}: target_modules and layers_to_transform name no layer of the model",
                   target_modules=contents.get("target_modules"), layers=contents.get("layers_to_transform"),
                   fix="the model that the adapters are of; or prefix=, for adapters of it without a head")  # fmt: skip
    cfg: Config
    if contents["peft_type"] == "IA3":
        cfg = ia3.Config(**fields)
    else:
        for name, default in (("ranks", fields["rank"]), ("alphas", fields["alpha"])):
            fields[name] = _patterns(fields[name], dict(zip(modules, names, strict=True)), default)
        cfg = lora.Config(**fields)
    leaves, targets, described = _described("peft.load", cfg, params, of)
    headers = WeightHeaders(path / WEIGHTS)
    raise_all([fail(f"{path / WEIGHTS}: {name!r} does not begin with {_START}", fix="adapters that PEFT has written")
               for name in headers.tensors if not name.startswith(_START)])  # fmt: skip
    headers.tensors = {name.removeprefix(_START): entry for name, entry in headers.tensors.items()}
    theirs = _file_tensors(cfg, described, leaves, of)
    ties = _tied_copies("peft.load", leaves, targets, of)
    errors = [fail(f"{path / WEIGHTS}: has no {head}.weight: PEFT has trained {table!r} apart from it",
                   "here they are tied", fix="in peft, modules_to_save with both, and ensure_weight_tying=True")
              for head, table in ties.values() if f"{head}.weight" not in headers.tensors]  # fmt: skip
    bases = {f"{leaf.module.removeprefix(prefix)}.base_layer.weight": theirs((name, "value")).parts(x.shape)[0].shape
             for name, (leaf, x) in targets.adapted.items() if not leaf.is_summed}  # fmt: skip
    unread = [name for name in headers.tensors if name.removeprefix(prefix) in bases]
    errors += [fail(f"{path / WEIGHTS}: {name!r} has another shape than the leaf of params: the vocabulary has grown",
                    got=list(shape), expected=list(bases[name.removeprefix(prefix)]),
                    fix="a base of that vocabulary, with this table; and ignored=['.base_layer.weight']")
               for name in unread if (shape := headers.tensors[name].shape) != bases[name.removeprefix(prefix)]
               and not name.endswith(tuple(ignored))]  # fmt: skip
    if contents.get("ensure_weight_tying"):
        errors += [fail(f"{path / CONFIG}: ensure_weight_tying, and {leaf.module!r} is adapted and tied",
                        "here a tied head uses the table without its adapter", fix="adapters trained without it")
                   for name, (leaf, _) in targets.adapted.items() if _tied_to(name, leaves, of)]  # fmt: skip
    raise_all(errors)
    copies = {f"{head}.weight": f"{table}.weight" for head, table in ties.values()}
    return cfg, read(
        headers, described, theirs, prefix=prefix, ignored=(*ignored, *unread, *_WRITTEN_TWICE), copies=copies
    )


@checked
def save(
    path: StrPath, cfg: Config, adapters: Adapters, params: Any, *, of: Of = None, prefix: str = "",
    like: StrPath | None = None, config: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write adapters as a folder that `PeftModel.from_pretrained` reads; every rank writes its bytes.

    The leaves of `adapters` are `Sharded`, on any mesh, or tensors that are the same on every rank. The folder changes
    all at once. `params`, `of` and `prefix` are as in `load`; the prefix is left out of the names in the folder.

    Args:
        like: a folder of adapters, such as the one that was loaded. Its tokenizer, processors and licence are copied,
            and what its config says of the base model and the task.
        config: the same keys, which replace `like`'s: task_type, base_model_name_or_path, revision,
            auto_mapping, peft_version.

    >>> cfg, adapters = fs.peft.load("my-adapters", params, of=gpt2.theirs)
    >>> adapters = fs.materialize(adapters, P("model"), mesh, key=fs.key(0))
    >>> fs.peft.save("again", cfg, adapters, params, of=gpt2.theirs, config={"task_type": "CAUSAL_LM"})

    Raises ShardingError, on every rank, listing every leaf that is missing, extra, of another shape than `cfg` says, or
    without values. The folder is then unchanged.
    """
    prefix = with_dot(prefix)
    flat = tree.leaves_with_path(adapters)

    def contents() -> Contents:
        leaves, targets, described = _described("peft.save", cfg, params, of)
        check_described(flat, tree.leaves_with_path(described))
        theirs = _file_tensors(cfg, described, leaves, of)
        ties = _tied_copies("peft.save", leaves, targets, of)

        def without_prefix(path: tree.Path) -> FileTensor:
            found, head = theirs(path[:2]), path[2:]
            name = f"{head[0]}.weight" if head else found.name
            return FileTensor(_START + name.removeprefix(prefix), found.dims)

        kept = _kept(like, config)
        written = _contents(cfg, leaves, targets, of, prefix, [head for head, _ in ties.values()])
        # Of a tied table PEFT has two copies. An object of its own is not taken for a tie.
        heads = [((name, "value", head), copy.copy(adapters[name]["value"])) for name, (head, _) in ties.items()]
        return output_tensors([*flat, *heads], without_prefix, ""), config_file(kept | written)

    write_files(path, flat, contents, like=like, single=WEIGHTS)


# --- names ----------------------------------------------------------------------------------------------------


def _leaves(params: Any, of: Any) -> Leaves:
    return {name: (path, leaf_of(of, path, x.ndim)) for name, (path, x) in named_leaves("peft", params).items()}


def _tied_to(name: str, leaves: Leaves, of: Any) -> list[str]:
    """Return the other modules of Hugging Face's model that have the matrix of a leaf, by its dotted path."""
    if hasattr(of, "module"):
        return [o.removesuffix(".weight") for o, first in of.ties.items() if first == name and o.endswith(".weight")]
    leaf = leaves[name][1]
    modules = {leaf.module for _, leaf in leaves.values()}
    if of is None or leaf.layout != "table" or leaf.module.rpartition(".")[2] not in _TABLES:
        return []
    if leaf.module == "shared":
        return ["encoder.embed_tokens", "decoder.embed_tokens", *({"lm_head"} - modules)]
    if "cls.predictions.transform.dense" in modules:
        return ["cls.predictions.decoder"]
    return [] if any(m.rpartition(".")[2] in HEADS for m in modules) else ["lm_head"]


def _tied_copies(verb: str, leaves: Leaves, targets: Targets, of: Any) -> dict[str, tuple[str, str]]:
    """Return the head and the table, of each table that trains in full and is tied to a head, by its dotted path."""
    modules = {name: leaves[name][1].module for name in [*targets.copied, *targets.adapted]}
    others = {name: _tied_to(name, leaves, of) for name in modules}
    raise_all([fail(f"{verb}: {modules[name]!r} is one table with {', '.join(own)}",
                    "PEFT adapts, or trains, only the layer that is named", fix="other targets and modules_to_save")
               for name, own in others.items() if len(own) > 1])  # fmt: skip
    return {name: (others[name][0], modules[name]) for name in targets.copied if others[name]}


def _saved(chosen: Sequence[str], modules: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules to save, by their names here; modules that the model lacks are left out."""
    wanted = [module for name, module in modules.items() if saves(chosen, name)]
    missing = set(without_module(chosen, wanted, inside=True))
    kept = tuple(s for s in chosen if s not in missing)
    same = [m for m in modules.values() if module_names(kept).contain(m)] == wanted
    return kept if same else tuple(wanted)


def _described(verb: str, cfg: Config, params: Any, of: Any) -> tuple[Leaves, Targets, dict[str, dict[str, Deferred]]]:
    """Return all leaves, with what their adapters take for a matrix; those that train; and the tree of the adapters."""
    leaves = _leaves(params, of)
    named = cfg.named if isinstance(cfg, ia3.Config) else cfg
    targets = Targets.among(verb, named, named_leaves(verb, params), of)
    out = {name: {"value": zeros(x.shape)} for name, x in targets.copied.items()}
    for name, (leaf, x) in targets.adapted.items():
        leaves[name] = leaves[name][0], leaf
        if isinstance(cfg, ia3.Config):
            out[name] = {"scale": zeros(leaf.split(tuple(x.shape))[not cfg.scales_inputs(leaf.module)])}
        else:
            out[name] = {part: zeros(shape) for part, shape in factor_shapes(cfg, leaf, tuple(x.shape)).items()}
    return leaves, targets, out


def _file_tensors(cfg: Config, described: Adapters, leaves: Leaves, of: Any) -> Callable[[tree.Path], FileTensor]:
    """Return the function from the path of a leaf of the adapters to its tensor in the file, without `_START`."""
    adapted = {leaves[name][1].module for name, own in described.items() if "value" not in own}

    def theirs(path: tree.Path) -> FileTensor:
        name, part = path
        own, leaf = leaves[name]
        dims = None if of is None or hasattr(of, "module") else of(own).dims
        if part == "value":
            layer = "base_layer." if leaf.module in adapted and leaf.part in ("bias", "b") else ""
            end = {"w": "weight", "b": "bias"}.get(leaf.part, leaf.part)
            return FileTensor(f"{leaf.module}.{layer}{end}", dims)
        if leaf.is_summed:
            return _of_parameter(leaf, part, described[name]["a"].ndim, adapted, of)
        factors = _factor_dims(dims or "i o -> i o", leaf.inputs)
        if isinstance(cfg, ia3.Config):
            return FileTensor(f"{leaf.module}.ia3_l", factors["in" if cfg.scales_inputs(leaf.module) else "out"])
        keys = _TABLE_KEYS if leaf.layout == "table" else _KEYS
        return FileTensor(f"{leaf.module}.{keys[part]}", factors[part])

    return theirs


def _of_parameter(leaf: Leaf, part: str, ndim: int, adapted: Container[str], of: Any) -> FileTensor:
    """Return the tensor of a factor of a parameter: peft wraps a module again for each of its adapted parameters."""
    if not hasattr(of, "module"):
        raise fail(f"peft: {leaf.module!r}: PEFT's target_parameters are of modules of transformers",
                   fix="the tree and the function that fs.defer returns for the model of transformers")  # fmt: skip
    module, _, parameter = leaf.module.rpartition(".")
    names = [n for n, _ in of.module.get_submodule(module).named_parameters(recurse=False)]
    outer = sum(f"{module}.{n}" in adapted for n in names[names.index(parameter) + 1 :])
    stack = {"a": "(e rank) i -> e i rank", "b": "o (rank e) -> rank e o"}
    dims = stack if ndim == 3 else {"a": "rank i -> i rank", "b": "o rank -> rank o"}
    return FileTensor(f"{module}.{'base_layer.' * outer}{_KEYS[part]}", dims[part])


def _factor_dims(dims: str, inputs: int) -> dict[str, str]:
    """Return the patterns of the factors of a matrix, and of scales, from its own.

    >>> _factor_dims("(g k) d -> d g k", 1)["b"], _factor_dims("(g k) d -> d g k", 1)["out"]
    ('(g k) rank -> rank g k', '(g k) 1 -> g k')
    """
    left, right = [re.findall(r"\([^)]*\)|\S+", side) for side in dims.split("->")]
    first = next(group for group in left if right[0] in re.findall(r"\w+", group))
    last = next(group for group in left if group != first)
    ins, outs = " ".join(right[:inputs]), " ".join(right[inputs:])
    return {"a": f"rank {first} -> {ins} rank", "b": f"{last} rank -> rank {outs}", "magnitude": f"{last} -> {outs}",
            "in": f"1 {first} -> {ins}", "out": f"{last} 1 -> {outs}"}  # fmt: skip


# --- the config -----------------------------------------------------------------------------------------------


def _kept(like: StrPath | None, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the config says of the base model and the task."""
    carried = {} if like is None else config_of(check_folder(like), CONFIG)
    raise_all([fail(f"save: config= has {name!r}, which follows from cfg", fix=f"one of {', '.join(KEPT)}")
               for name in config or {} if name not in KEPT])  # fmt: skip
    out: dict[str, Any] = dict.fromkeys(KEPT)
    return out | {k: v for k, v in carried.items() if k in KEPT} | dict(config or {})


def _contents(
    cfg: Config, leaves: Leaves, targets: Targets, of: Any, prefix: str, heads: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of the config that say what the adapters compute."""
    adapted = {leaf.module for leaf, _ in targets.adapted.values() if not leaf.is_summed}
    names = {m.removeprefix(prefix): m for m in dict.fromkeys(leaf.module for _, leaf in leaves.values())}
    saved = [s.removeprefix(prefix) for s in cfg.modules_to_save]
    whole = [n for n, m in names.items() if module_names(tuple(cfg.modules_to_save)).contain(m)]
    if [n for n in names if saves(saved, n)] != whole:  # a glob, or the end of the name of another module
        saved = whole
    excluded, chosen = plain(cfg.exclude), plain(cfg.targets)
    left_out = module_names(tuple(saved))
    as_peft = {m for n, m in names.items()
               if selects(chosen, n) and not selects(excluded, n) and not left_out.contain(n)}  # fmt: skip
    forward: Any = cfg.feedforward if isinstance(cfg, ia3.Config) else ()
    first = {m for m in adapted if isinstance(cfg, ia3.Config) and cfg.scales_inputs(m)}
    as_peft_first = {m for n, m in names.items() if m in adapted and (
        re.fullmatch(forward, n) if isinstance(forward, str) else n.endswith(forward))}  # fmt: skip
    if as_peft != adapted or as_peft_first != first:  # a glob, "all-linear", or an expression for names with the prefix
        inside = [n for n, m in names.items() if m in adapted]
        chosen, excluded = only(inside, list(names), selects), []
        forward = only([n for n in inside if names[n] in first], inside, lambda ends, n: n.endswith(tuple(ends)))
    parameters = {
        leaf.module.removeprefix(prefix): leaf.module for leaf, _ in targets.adapted.values() if leaf.is_summed
    }
    own = {n: m for n, m in names.items() if m in adapted} | parameters
    inputs_first = any(_stores_inputs_first(*leaves[name], of) for name in targets.adapted)
    common = {"inference_mode": True, "target_modules": chosen, "exclude_modules": excluded or None,
              "modules_to_save": [*saved, *heads] or None, "fan_in_fan_out": inputs_first}  # fmt: skip
    if isinstance(cfg, ia3.Config):
        return {**common, "peft_type": "IA3", "feedforward_modules": plain(forward), "init_ia3_weights": True}
    ranks, alphas = _patterns(cfg.ranks, own, cfg.rank), _patterns(cfg.alphas, own, cfg.alpha)
    return {
        **common, "peft_type": "LORA", "r": cfg.rank, "lora_alpha": cfg.alpha, "rank_pattern": ranks,
        "alpha_pattern": alphas, "lora_dropout": cfg.dropout, "use_rslora": cfg.rslora, "use_dora": cfg.dora,
        "target_parameters": list(parameters) or None, "bias": cfg.bias,
        "init_lora_weights": {"kaiming": True, "random": False}.get(cfg.init, cfg.init),
    }  # fmt: skip


def _patterns(patterns: Mapping[str, Any], modules: Mapping[str, str], default: Any) -> dict[str, Any]:
    """Return ranks or alphas of `modules`, {name: the name that patterns are of}: patterns, or names if they differ."""
    values = {name: value_for(patterns, module, default) for name, module in modules.items()}
    if all(value_for(patterns, name, default) == value for name, value in values.items()):
        return dict(patterns)
    return {f"^{re.escape(name)}": value for name, value in values.items() if value != default}


def _stores_inputs_first(path: tree.Path, leaf: Leaf, of: Any) -> bool:
    """Return whether the model's own layer stores a matrix [in, out], as GPT-2's."""
    if leaf.layout == "table" or of is None:
        return False
    if hasattr(of, "module"):
        return leaf.layout == "io"
    found: FileTensor = of(path)
    return found.dims is None or found.pattern(leaf.inputs + 1).origins[0] == 0

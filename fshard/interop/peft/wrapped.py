"""Adapters of a module that `peft.get_peft_model` has wrapped: any method of peft, under the names that it gives."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import Tensor

from fshard import tree
from fshard._core.files.io import StrPath
from fshard.defer import Apply
from fshard.errors import checked, fail, must_be, raise_all
from fshard.init import Deferred
from fshard.interop.hf import FileTensor, config_of, tensors
from fshard.interop.hf.export import Contents, write_files
from fshard.interop.hf.layout import output_tensors
from fshard.interop.hf.module import name_of
from fshard.spec import describe

from .files import CONFIG, WEIGHTS, check_folder, config_file, plain

# Fields that may differ between a folder and the module that reads it: they say nothing of what the adapters compute.
_FREE = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config",
         "merge_weights", "init_weights", "init_lora_weights", "lora_dropout", "dropout", "module_dropout"}  # fmt: skip


@checked
def weights(folder: StrPath, described: Any, *, of: Apply, adapter: str = "default") -> Any:
    """Return the leaves of a module that peft has wrapped, its adapters with their values in a folder.

    `described` is the tree that `fs.defer` returned with `of`, or only its params or buffers; other leaves are
    returned unchanged. `fs.hf.weights(base, tree, of=apply, missing=("*.lora_*",))` reads the base model's,
    and is called before: it also reads the base's values for trained copies. DoRA's magnitudes, which follow from the
    base, it refuses unless they are read already: call this before and after. Dtypes are the file's.

    >>> config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    >>> apply, module = fs.defer(lambda: peft.get_peft_model(AutoModel.from_config(base), config))
    >>> module = fs.peft.weights("my-adapters", module, of=apply)

    Raises ShardingError, before any value is read, listing every field in which the folder's config differs from the
    module's, and every tensor that is missing, extra or of another shape.
    """
    root = check_folder(folder)
    contents, stored = config_of(root, CONFIG), tensors(root / WEIGHTS)
    model = _wrapped(of, adapter)
    path = f"{folder}/{CONFIG}"
    own = {k: v for k, v in plain(model.peft_config[adapter].to_dict()).items() if k not in _FREE}
    file = {k: v for k, v in {**_defaults(model.peft_config[adapter]), **contents}.items() if k not in _FREE}
    errors = [fail(f"{path}: {name} is not the module's", folder=file.get(name), module=own.get(name),
                   fix="the config that peft.PeftConfig.from_pretrained(folder) returns")
              for name in sorted({*own, *file}) if _differ(own.get(name), file.get(name))]  # fmt: skip
    names = _names_in_module(of, model, adapter)
    wanted = {name: key for key, name in names.items()}
    out = []
    for p, leaf in tree.leaves_with_path(described):
        key = wanted.get(name_of(p, described))
        found = stored.get(key or "")
        if key is None:
            out.append(leaf)
        elif found is None:
            errors.append(fail(f"{folder}: {key!r} is missing", f"for {tree.show('tree', p)}, {leaf!r}"))
        elif not isinstance(leaf, Deferred):
            errors.append(must_be(f"weights: {tree.show('tree', p)}", "a Deferred", leaf))
        elif found.shape != leaf.shape:
            errors.append(fail(f"{folder}: {key!r} has another shape, for {tree.show('tree', p)}",
                               got=list(found.shape), expected=list(leaf.shape)))  # fmt: skip
        else:
            out.append(found)
    errors += [fail(f"{folder}/{WEIGHTS}: {key!r} is not part of the adapters of this module", describe(x))
               for key, x in stored.items() if key not in names]  # fmt: skip
    raise_all(errors)
    return tree.unflatten(tree.structure(described), out)


@checked
def save_module(
    path: StrPath, leaves: Any, *, of: Apply, adapter: str = "default", like: StrPath | None = None
) -> None:
    """Write the adapters of a module that peft has wrapped as a folder that `PeftModel.from_pretrained` reads.

    `leaves` is the tree of the module, `Sharded` on any mesh or tensors; leaves of the base model are left
    out: what `save_pretrained` of peft writes. Every rank writes its bytes; the folder changes all at once.

    >>> fs.peft.save_module("my-adapters", params, of=apply)

    Raises ShardingError, on every rank, listing every leaf that is missing or has no values.
    """
    model = _wrapped(of, adapter)
    names = _names_in_module(of, model, adapter)
    found = {name_of(p, leaves): x for p, x in tree.leaves_with_path(leaves)}
    # A leaf that several layers share is in the file under the name of each: a copy is not taken for a tie.
    chosen = [((key, name), copy.copy(found[name])) for key, name in names.items() if name in found]

    def contents() -> Contents:
        raise_all([fail(f"write: {name!r} is missing", fix="write the full tree: {'params': ..., 'buffers': ...}")
                   for name in names.values() if name not in found])  # fmt: skip
        return output_tensors(chosen, lambda p: FileTensor(p[0]), ""), config_file(_contents(model, adapter))

    write_files(path, chosen, contents, like=like, single=WEIGHTS)


def _contents(model: Any, adapter: str) -> dict[str, Any]:
    config = model.peft_config[adapter]
    out: dict[str, Any] = {**plain(config.to_dict()), "inference_mode": True}
    base = model.get_base_model()
    out["base_model_name_or_path"] = out.get("base_model_name_or_path") or getattr(base, "name_or_path", None) or None
    if out.get("task_type") is None:
        kind = type(base)
        out["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return out


def _wrapped(of: Apply, adapter: str) -> Any:
    module: Any = of.module
    if not hasattr(module, "peft_config") or not hasattr(module, "get_base_model"):
        raise fail(f"peft: {of!r} is not a module that peft has wrapped",
                   fix="fs.defer(lambda: peft.get_peft_model(model, config)); "
                       "or fs.peft.load(folder, tree, of=apply) for adapters outside the module")  # fmt: skip
    if adapter not in module.peft_config:
        raise fail(f"peft: the module has no adapter {adapter!r}", fix=f"one of {', '.join(module.peft_config)}")
    return module


def _names_in_module(of: Apply, model: Any, adapter: str) -> dict[str, str]:
    """Return the name of the leaf for the name of each tensor in the file, as peft itself chooses and names them."""
    from peft import get_peft_model_state_dict

    if model.peft_config[adapter].is_prompt_learning:
        return {"prompt_embeddings": _prompt(model, adapter)}
    state: dict[str, Tensor] = model.state_dict()
    name_of_tensor = {id(x): name for name, x in state.items()}
    chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    raise_all([fail(f"peft: {key!r} is computed from several leaves when it is saved", fix="save it by peft itself")
               for key, x in chosen.items() if id(x) not in name_of_tensor])  # fmt: skip
    names = {key: name_of_tensor[id(x)] for key, x in chosen.items()}
    return {key: of.ties.get(name, name) for key, name in names.items()}


def _prompt(model: Any, adapter: str) -> str:
    encoder = model.prompt_encoder[adapter]
    names = [name for name, _ in encoder.named_parameters()]
    if names != ["embedding.weight"]:
        raise fail("peft: the prompt is computed by an encoder, and saved as its result",
                   f"from {', '.join(names)}", fix="prompt tuning, or prefix tuning without a projection")  # fmt: skip
    return f"prompt_encoder.{adapter}.embedding.weight"


def _defaults(config: Any) -> dict[str, Any]:
    """Return the values of fields that a folder of an earlier version of peft lacks."""
    out = {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
           for f in dataclasses.fields(config)}  # fmt: skip
    return {name: plain(x) for name, x in out.items() if x is not dataclasses.MISSING}


def _differ(ours: Any, other: Any) -> bool:
    if ours in (None, [], {}) and other in (None, [], {}):
        return False
    if isinstance(ours, list) and isinstance(other, list):
        return sorted(map(str, ours)) != sorted(map(str, other))
    return bool(ours != other)

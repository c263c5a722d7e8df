"""Names and shapes of a module of transformers in its files, by the conversions that transformers registers for it.

Since version 5 `from_pretrained` and `save_pretrained` rename tensors and change their shapes: the experts of a layer,
a tensor each in the file, are one leaf; a file has q, k and v as one tensor. The library's own functions run here on
`Traced` tensors, so the result is plain data: for each leaf, the parts of the tensors in files that it consists of.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fshard.errors import ShardingError, fail, join_limited
from fshard.spec import box_shape

from .places import FilePart, Places
from .traced import Traced, trace

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pretrained:
    """A module of transformers: `model`, at the path `prefix` of the module that contains it; `adapted` by peft."""

    model: Any
    prefix: str
    adapted: bool

    def plain_name(self, name: str) -> str:
        """Return the name that a leaf has in the model before peft wraps its layers.

        >>> Pretrained(None, "base_model.model", adapted=True).plain_name("base_model.model.lm_head.base_layer.weight")
        'lm_head.weight'
        """
        if not self.adapted:
            return name
        name = name.removeprefix(f"{self.prefix}.")
        return re.sub(r"(?<![^.])(base_layer|original_module|modules_to_save\.[^.]+)\.", "", name)

    @property
    def tied(self) -> Collection[str]:
        """Names that `save_pretrained` leaves out, since `from_pretrained` ties them to others."""
        return getattr(self.model, "all_tied_weights_keys", {})

    def may_lack(self, name: str) -> bool:
        """Return whether transformers writes no file with this tensor, or reads one without it as complete."""
        on_save = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
        on_load = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()
        return name in on_save or any(re.search(pattern, name) for pattern in on_load)

    def skips(self, name: str) -> bool:
        """Return whether transformers reads no tensor of this name: a buffer that older versions stored."""
        patterns = list(getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ())
        for buffer in ("rotary_emb.inv_freq", "position_ids"):  # once of each layer, or persistent
            if any(n.endswith(buffer) for n, _ in self.model.named_buffers()):
                patterns.append(rf"(^|\.){re.escape(buffer)}$")
        return any(re.search(pattern, name) for pattern in patterns)


@dataclass
class Converted:
    """Leaves as parts of the tensors in files, by their names in the model, and the names in files that remain."""

    leaves: dict[str, Traced] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    errors: list[ShardingError] = field(default_factory=list)


def pretrained_in(module: nn.Module) -> Pretrained | None:
    """Return the module as one of transformers, or the one that peft has wrapped; None for any other module."""
    transformers = sys.modules.get("transformers.modeling_utils")  # an instance exists only if it is imported
    if transformers is None:
        return None
    if isinstance(module, transformers.PreTrainedModel):
        return Pretrained(module, "", hasattr(module, "peft_config"))
    if hasattr(module, "peft_config"):
        for name, m in module.named_modules():
            if isinstance(m, transformers.PreTrainedModel):
                return Pretrained(m, name, True)
    return None


def from_files(pretrained: Pretrained, shapes: dict[str, Shape], stored: Mapping[str, Traced]) -> Converted:
    """Convert the tensors in files, by name, to a model's leaves, of these `shapes`, as `from_pretrained` does."""
    out = Converted()
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
    except ImportError:  # version 4 writes the names and shapes of the module
        out.leaves.update({name: x for name, x in stored.items() if name in shapes})
        out.unknown += [name for name in stored if name not in shapes]
        return out
    mapping = get_model_conversion_mapping(pretrained.model)
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    renamings: list[Any] = [x for x in mapping if not isinstance(x, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    base = pretrained.model.base_model_prefix
    groups: dict[str, tuple[Any, list[str]]] = {}
    source_of: dict[str, str] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, base, shapes)
        if target not in shapes and name in shapes:  # a name of the module itself, which a rule takes for an old one
            target, pattern = rename_source_key(name, [], [], base, shapes)
        if target not in shapes:
            out.unknown.append(name)
        elif pattern is not None:
            converter, names = groups.setdefault(target, (copy.deepcopy(by_pattern[pattern]), []))
            converter.add_tensor(target, name, pattern, stored[name])
            names.append(name)
        elif source_of.setdefault(target, name) != name:
            out.errors.append(fail(f"{name!r} and {source_of[target]!r} are both {target!r} of the module",
                                   fix="take one of them out of the file"))  # fmt: skip
        else:
            out.leaves[target] = stored[name]
    like = SimpleNamespace(config=pretrained.model.config,
                           get_parameter=lambda name: torch.empty(shapes[name], device="meta"))  # fmt: skip
    for target, (converter, names) in groups.items():
        try:
            out.leaves.update(_one(converter.convert(target, model=like, config=pretrained.model.config)))
        except Exception as e:  # of an operation of the library, on tensors that are missing or of other shapes
            out.errors.append(_cannot_convert(names, target, e))
    return out


def to_files(pretrained: Pretrained, shapes: Mapping[str, tuple[Shape, torch.dtype]]) -> dict[str, Traced]:
    """Convert the leaves of a model to the tensors in files, by name, as `save_pretrained` does.

    The result has for each leaf the parts of the tensors in files. Raises ShardingError unless `from_pretrained` gives
    exactly these leaves back.
    """
    leaves: dict[str, Any] = {name: trace(name, shape, dtype) for name, (shape, dtype) in shapes.items()}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # version 4
        return leaves
    try:
        written = _one(revert_weight_conversion(pretrained.model, leaves))
    except Exception as e:  # of an operation of the library
        raise _cannot_convert(list(leaves), "its files", e) from e
    only_shapes = {name: shape for name, (shape, _) in shapes.items()}
    back = from_files(pretrained, only_shapes, written)
    errors = [*back.errors, *(fail(f"{name!r} of the file is not read again") for name in back.unknown)]
    errors += [fail(f"{name!r} of the module is not the same when its file is read again")
               for name, x in leaves.items() if not _is_complete(back.leaves.get(name), name, x)]  # fmt: skip
    if errors:
        raise fail(f"{type(pretrained.model).__name__}: transformers cannot read what its conversion writes",
                   *map(str, errors[:3]))  # fmt: skip
    stored = {name: trace(name, x.shape, x.dtype) for name, x in written.items()}
    return from_files(pretrained, only_shapes, stored).leaves


def _is_complete(x: Traced | None, name: str, leaf: Traced) -> bool:
    """Return whether the parts of a tensor are all of a leaf, each element at its place."""
    if x is None or x.shape != leaf.shape:
        return False

    def at(places: Places, part: FilePart) -> Places:
        return places.reshape(box_shape(part.box))  # its only form

    own = Places.of(leaf.shape)
    return all(part.name == name and [at(part.places, part)] == [at(places, part) for _, places in own.boxes(part.box)]
               for part in x.parts)  # fmt: skip


def _one(converted: Mapping[str, Any]) -> dict[str, Traced]:
    return {name: x[0] if isinstance(x, list) else x for name, x in converted.items()}


def _cannot_convert(names: Sequence[str], target: str, e: Exception) -> ShardingError:
    return fail(f"transformers cannot convert {join_limited(list(map(repr, names)), 3)} to {target!r}",
                f"{type(e).__name__}: {e}")  # fmt: skip

"""The `config.json` of a Hugging Face folder as a `Config` of a model here, and its tensors as leaves of our tree."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from fshard import tree
from fshard._core.files.io import StrPath
from fshard._core.files.url import as_path
from fshard.errors import ShardingError, fail
from fshard.interop.hf import CONFIG, FileTensor, config_of

C = TypeVar("C")
_LAYERS = ("n_layer", "num_layers", "num_hidden_layers", "depths", "num_local_experts")  # numbers of parts of a model
_MAX_LAYERS = 1_000  # as many as the deepest published transformer has


def read_config(
    folder: StrPath, cls: type[C], fixed: Mapping[str, Any], absent: Mapping[str, int] | None = None, **others: Any
) -> C:
    """Read the fields of `cls` from `config.json`; `others` are fields that have another name there.

    `fixed` is what every model of this type has, by name: `model_type`, and options for which there is one choice
    here. A config without one of these options has that choice. `absent` are the tokens of a config that lacks them, as
    transformers has them, unless they are outside the vocabulary.

    Raises ShardingError listing every option with another value, every field of another type, or a missing
    `model_type`.
    """
    config = config_of(folder)
    different = [f"{name}: {config.get(name)!r}, not {want!r}" for name, want in fixed.items()
                 if config.get(name, None if name == "model_type" else want) != want]  # fmt: skip
    if different:
        raise fail(f"{as_path(folder) / CONFIG}: not a supported {fixed['model_type']}", *different,
                   fix="use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))")  # fmt: skip
    size = config.get("vocab_size")
    tokens = {name: n for name, n in (absent or {}).items() if not isinstance(size, int) or n < size}
    config = tokens | config
    values = {f.name: config[f.name] for f in fields(cls) if f.name in config} | others  # type: ignore[arg-type]
    values |= {name: None for name, token in values.items() if name.endswith("_token_id") and token == -1}
    hints = typing.get_type_hints(cls)
    values = {name: tuple(x) if isinstance(x, list) and _has_type((), hints[name]) else x
              for name, x in values.items()}  # fmt: skip
    wrong = [f"{name}: {value!r}" for name, value in values.items() if not _has_type(value, hints[name])]
    if wrong:
        raise fail(f"{as_path(folder) / CONFIG}: has values of the wrong kind", *wrong, fix="copy it again")
    counts = {name: sum(n) if isinstance(n := values[name], tuple) else n for name in _LAYERS if values.get(name)}
    if math.prod(counts.values()) > _MAX_LAYERS:  # each is a node of the tree, which would fill the memory
        raise fail(f"{as_path(folder) / CONFIG}: describes more than {_MAX_LAYERS:,} layers",
                   " * ".join(f"{n:,} {name}" for name, n in counts.items()),
                   fix="copy it again; or cls(num_layers), of the model file, for so deep a model")  # fmt: skip
    try:
        return cls(**values)
    except ShardingError:
        raise
    except Exception as e:  # of arithmetic with values that have the right types
        raise fail(f"{as_path(folder) / CONFIG}: describes no model", f"{type(e).__name__}: {e}",
                   fix="copy it again") from e  # fmt: skip


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of a field: an int is also a float, and sizes are not negative."""
    if isinstance(hint, types.UnionType):
        return any(_has_type(value, one) for one in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is typing.Literal:
        return value in typing.get_args(hint)
    if kind is tuple:
        return isinstance(value, tuple) and all(_has_type(x, typing.get_args(hint)[0]) for x in value)
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 31
    return type(value) in (int, float) if kind is float else isinstance(value, kind)


def weight_and_bias(ours: str, name: str, w: str | None = None, b: str | None = None) -> dict[str, FileTensor]:
    """The leaves `ours.w` and `ours.b` of a layer, whose tensors are `name.weight` and `name.bias`, with their dims."""
    return {f"{ours}.w": FileTensor(f"{name}.weight", w), f"{ours}.b": FileTensor(f"{name}.bias", b)}


def file_tensor(
    path: tree.Path, top: Mapping[str, FileTensor], block: Mapping[str, FileTensor], blocks: str
) -> FileTensor:
    """The file tensor of the leaf at a path: from `block` for a leaf of a block ("h", number, ...), else from `top`.

    `blocks` is the prefix of the blocks' tensors, before the number of the block.

    >>> file_tensor(("h", 3, "w"), {}, {"w": FileTensor("ln_1.weight")}, "transformer.h")
    FileTensor(name='transformer.h.3.ln_1.weight', dims=None, at=None)
    """
    in_block = bool(path) and path[0] == "h"
    name, known = tree.dotted(path[2:] if in_block else path), block if in_block else top
    if name not in known or (in_block and type(path[1]) is not int):
        raise fail(f"theirs: the model has no leaf at the path {path!r}",
                   fix=f"one of {', '.join(top)}, or ('h', 0, ...) and one of {', '.join(block)}")  # fmt: skip
    if not in_block:
        return top[name]
    inner = block[name]
    return replace(inner, name=f"{blocks}.{path[1]}.{inner.name}")

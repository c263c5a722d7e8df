"""A Hugging Face folder as a model here reads it: its `config.json` as a `Config`, and its names of tensors."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fshard import tree
from fshard._io import StrPath
from fshard.errors import fail
from fshard.interop.hf import CONFIG, FileTensor, config_of

C = TypeVar("C")


def read_config(folder: StrPath, cls: type[C], fixed: Mapping[str, Any], **others: Any) -> C:
    """The `cls` whose fields `config.json` sets; `others` are fields it has under another name.

    `fixed` is what the model is, by name: `model_type`, and choices it does not offer. A config that leaves one of
    these out has it.

    Raises ShardingError listing all that is different or of another kind than its field, or if `model_type` is not
    there.
    """
    given = config_of(folder)
    wrong = [f"{name}: {given.get(name)!r}, not {want!r}" for name, want in fixed.items()
             if given.get(name, None if name == "model_type" else want) != want]  # fmt: skip
    if wrong:
        raise fail(f"{Path(folder) / CONFIG}: not a {fixed['model_type']} as it is here", *wrong,
                   fix="use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))")  # fmt: skip
    found = {f.name: given[f.name] for f in fields(cls) if f.name in given} | others  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    odd = [f"{name}: {value!r}" for name, value in found.items() if not _fits(value, hints[name])]
    if odd:
        raise fail(f"{Path(folder) / CONFIG}: has values of the wrong kind", *odd, fix="copy it again")
    try:
        return cls(**found)
    except ArithmeticError as e:
        raise fail(f"{Path(folder) / CONFIG}: describes no model", f"{type(e).__name__}: {e}",
                   fix="copy it again") from e  # fmt: skip


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is what a field holds: whole numbers are floats too, and sizes are not negative."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is int:
        return type(value) is int and value >= 0
    return type(value) in (int, float) if kind is float else isinstance(value, kind)


def their(path: tree.Path, top: Mapping[str, FileTensor], block: Mapping[str, FileTensor], blocks: str) -> FileTensor:
    """The tensor that the leaf at a path is: of `top`, or, below `h`, of `block` under `blocks` and the block's number.

    >>> their(("h", 3, "w"), {}, {"w": FileTensor("ln_1.weight")}, "transformer.h")
    FileTensor(name='transformer.h.3.ln_1.weight', dims=None, at=None)
    """
    if path[0] != "h":
        return top[tree.dotted(path)]
    inner = block[tree.dotted(path[2:])]
    return replace(inner, name=f"{blocks}.{path[1]}.{inner.name}")


__all__ = ["read_config", "their"]

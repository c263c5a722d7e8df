"""The `config.json` of a Hugging Face folder as a model's `Config`: what it sets, and what the model here cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fshard.errors import fail
from fshard.interop.folder import CONFIG, Where, config_of

C = TypeVar("C")


def read_config(folder: Where, cls: type[C], fixed: Mapping[str, Any], **others: Any) -> C:
    """The `cls` whose fields `config.json` sets; `others` are fields it has under another name.

    `fixed` is what the model is, by name: `model_type`, and choices it does not offer. A config that leaves one of
    these out has it.

    Raises ShardingError listing all that is different, or if `model_type` is not there.
    """
    given = config_of(folder)
    wrong = [f"{name}: {given.get(name)!r}, not {want!r}" for name, want in fixed.items()
             if given.get(name, None if name == "model_type" else want) != want]  # fmt: skip
    if wrong:
        raise fail(f"{Path(folder) / CONFIG}: not a {fixed['model_type']} as it is here", *wrong,
                   fix="use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))")  # fmt: skip
    return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given} | others)  # type: ignore[arg-type]


__all__ = ["read_config"]

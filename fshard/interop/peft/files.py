"""Folders of adapters: `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fshard._core.files.io import StrPath
from fshard._core.files.url import AnyPath, as_path
from fshard.errors import fail
from fshard.interop.hf import PICKLES
from fshard.interop.hf.carried import encode_json
from fshard.interop.hf.folder import ADAPTER, ADAPTER_CONFIG

CONFIG, WEIGHTS = ADAPTER_CONFIG, ADAPTER


def check_folder(folder: StrPath) -> AnyPath:
    """Return the path of a folder that has both files. An error lists the folders in it that have them."""
    path = as_path(folder)
    if (path / CONFIG).is_file() and (path / WEIGHTS).is_file():
        return path
    if not path.is_dir():
        raise fail(f"{path}: there is no such folder", fix="give a folder that save_pretrained of peft wrote")
    names = sorted(f.name for f in path.iterdir())
    missing = [n for n in (CONFIG, WEIGHTS) if n not in names]
    pickles = [n for n in names if n.startswith("adapter_model") and n.endswith(PICKLES)]
    inside = [n for n in names if (path / n / CONFIG).is_file()]
    if WEIGHTS in missing and pickles:
        raise fail(f"{path}: pickles are refused", f"it has {', '.join(pickles)}; a pickle runs any code that is in it",
                   fix="convert it on a machine that may run that: PeftModel.from_pretrained(model, a)"
                       ".save_pretrained(b)")  # fmt: skip
    fix = f"one of the folders in it: {', '.join(inside)}" if inside else "give a folder of adapters"
    raise fail(f"{path}: has no {' and no '.join(missing)}", f"it holds {', '.join(names) or 'nothing'}", fix=fix)


def config_file(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of the config, by its name, as peft writes it."""
    return {CONFIG: encode_json(CONFIG, config).rstrip()}


def plain(value: Any) -> Any:
    """Return a value of a config as JSON has it: sets as sorted lists, members of an enum as their values."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    return getattr(value, "value", value)

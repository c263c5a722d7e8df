"""The small files of a folder of weights: config.json, and files that are carried over from another folder.

config.json               the caller's keys, and the other folder's keys that it lacks; the dtype of the leaves
generation_config.json    copied, with the tokens that the caller has changed
tokenizer.json, ...       copied
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fshard._core.files.io import StrPath, open_file
from fshard._core.files.url import AnyPath, as_path
from fshard.errors import fail

from .folder import GENERATION_CONFIG, config_of, read_json

_CARRIED = (
    GENERATION_CONFIG, "tokenizer*", "vocab*", "merges*", "added_tokens.json", "special_tokens_map.json", "*.model",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*", "*processor_config.json", "*.py", "LICENSE*",
    "NOTICE*",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
# Keys that describe the stored values, and older names of a key that says the same.
_NOT_CARRIED = {"dtype", "torch_dtype", "quantization_config"}
_OLD_NAMES = {"rope_parameters": {"rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct",
                                  "rotary_emb_base"}}  # fmt: skip


def complete_config(config: Mapping[str, Any], leaves: Sequence[Any], like: StrPath | None) -> bytes:
    """Return the contents of config.json."""
    out = {**_carried_keys(config, like), **config}
    numbers: Counter[torch.dtype] = Counter()
    for x in {id(x): x for x in leaves if x.dtype.is_floating_point and x.dtype.itemsize > 1}.values():
        numbers[x.dtype] += math.prod(x.shape)
    if numbers:  # a few leaves may be wider: the biases of a router, the statistics of a norm
        most = max(numbers, key=lambda dtype: (numbers[dtype], dtype.itemsize))
        out["dtype"] = str(most).removeprefix("torch.")
        out.pop("torch_dtype", None)
    return encode_json("config=", out)


def _carried_keys(config: Mapping[str, Any], like: StrPath | None) -> dict[str, Any]:
    if like is None:
        return {}
    other, kind = config_of(like), config.get("model_type")
    if other.get("model_type") != kind:
        raise fail(f"write: like={str(like)!r} is a folder of another type of model",
                   f"its model_type is {other.get('model_type')!r}, and config= has {kind!r}",
                   fix="the folder that was loaded; or leave like= out")  # fmt: skip
    left_out = _NOT_CARRIED.union(*(names for key, names in _OLD_NAMES.items() if key in config))
    out = {key: value for key, value in other.items() if key not in config and key not in left_out}
    depth = next((d for d in _DEPTHS if d in other and d in config), "")
    if depth and other[depth] != config[depth]:
        per_layer = [key for key, value in out.items() if isinstance(value, list) and len(value) == other[depth]]
        if per_layer:
            raise fail(f"write: like={str(like)!r} has {other[depth]} layers, and config= has {config[depth]}",
                       f"of {', '.join(per_layer)} it has an entry for each layer",
                       fix="leave like= out, and copy the files that fit")  # fmt: skip
    return out


def carried_files(config: Mapping[str, Any], like: StrPath | None) -> dict[str, bytes]:
    """Read the files of `like` that are not weights, by name; generation_config.json has the tokens of the config."""
    if like is None:
        return {}
    folder = as_path(like)
    paths = sorted({path for pattern in _CARRIED for path in folder.glob(pattern) if path.is_file()}, key=str)
    out = {path.relative_to(folder).as_posix(): _read(path) for path in paths if path.suffix != ".safetensors"}
    if GENERATION_CONFIG in out:
        before, generation = config_of(folder), read_json(folder / GENERATION_CONFIG)
        changed = {key: config[key] for key in _TOKENS if key in before and config.get(key, before[key]) != before[key]}
        if any(generation.get(key) != token for key, token in changed.items()):
            out[GENERATION_CONFIG] = encode_json(GENERATION_CONFIG, generation | changed)
    return out


def _read(path: AnyPath) -> bytes:
    with open_file(path) as f:
        return f.read()


def encode_json(name: str, value: Mapping[str, Any]) -> bytes:
    """Return the contents of a file. Raises ShardingError if `value` is not JSON."""
    try:
        return (json.dumps(dict(value), indent=2, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as e:
        raise fail(f"write: {name} is not JSON", str(e), fix="numbers, strings, booleans, None, lists and dicts") from e

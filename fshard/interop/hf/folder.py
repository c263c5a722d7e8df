"""Headers of a Hugging Face folder: its tensors, and every error in its files.

config.json                           sizes and rates
model.safetensors                     every tensor; or
model.safetensors.index.json          the file of every tensor, and
model-00001-of-00002.safetensors      these files
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fshard._core.files.io import StrPath, open_file
from fshard._core.files.safetensors import DTYPES, HeaderEntry, read_header
from fshard._core.files.torch_file import read_torch_file
from fshard._core.files.url import AnyPath, as_path, exists, is_file
from fshard.errors import ShardingError, checked, fail

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SUFFIX = ".safetensors"
_SAVED = "give a folder that save_pretrained wrote"


class WeightHeaders:
    """The tensors of a folder, or of one file, by name, with the errors in their headers.

    `complete` is False if the header of a file could not be read: `tensors` then lacks the tensors of that file.
    `state_dict`: `path` is one file, of safetensors or of `torch.save`, or the index of several.
    """

    def __init__(self, path: StrPath, *, state_dict: bool = False) -> None:
        self.path = path = as_path(path)
        self.tensors: dict[str, HeaderEntry] = {}
        self.errors: list[ShardingError] = []
        self.state_dict = state_dict
        self.complete = True
        single, index = path / SINGLE, path / INDEX
        if state_dict and path.name.endswith(".index.json"):
            self._read_index(path)
        elif path.suffix in PICKLES and not state_dict and is_file(path):
            raise _refuse_pickles(path, [path.name])
        elif state_dict or is_file(path):
            self.tensors = self._read_file(path) or {}
        elif is_file(single):  # also if an index exists too, as from_pretrained does
            self.tensors = self._read_file(single) or {}
        elif is_file(index):
            self._read_index(index)
        else:
            raise _no_weights(path)

    def _read_file(self, path: AnyPath) -> dict[str, HeaderEntry] | None:
        try:
            is_torch = self.state_dict and path.suffix != SUFFIX
            header = read_torch_file(Path(path)) if is_torch else read_header(path)
        except ShardingError as e:
            self.complete = False
            self.errors.append(e)
            return None
        self.errors += header.errors
        tensors = {entry.name: entry for entry in header.entries}
        aliases = header.aliases.items() if self.state_dict else ()
        return tensors | {alias: tensors[name] for alias, name in aliases}

    def _read_index(self, index: AnyPath) -> None:
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise fail(f"{index}: has no weight_map, from names of tensors to names of files", fix="copy it again")
        file_of = {name: str(Path(file)) for name, file in file_of.items()}  # one text for each file
        names_of: dict[str, list[str]] = {}
        for name, file in file_of.items():
            names_of.setdefault(file, []).append(name)
        for file, names in sorted(names_of.items()):
            path = index.parent / file
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise fail(f"{index}: {file!r} is outside the folder", f"for {', '.join(names)}")
            if not is_file(path):
                self.errors.append(fail(f"{path}: there is no such file", f"for {', '.join(names)}"))
                self.complete = False
                continue
            tensors = self._read_file(path)
            if tensors is None:
                continue
            self.errors += [fail(f"{path}: {name!r} is not in it", f"{index.name} says it is")
                            for name in names if name not in tensors]  # fmt: skip
            self.tensors |= {name: entry for name, entry in tensors.items() if file_of.get(name, file) == file}


# Ends of names of tensors that come with quantized weights: GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes, MXFP4.
_QUANTIZED = (".qweight", ".qzeros", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".SCB",
              ".weight.absmax", ".weight.quant_map", "_proj_blocks", "_proj_scales")  # fmt: skip
_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def explain_names(
    headers: WeightHeaders, verb: str, lacking: Sequence[str], extra: Sequence[str], prefix: str = "", call: str = ""
) -> ShardingError | None:
    """Return why a folder has other names than a tree: it is quantized, or names differ by a prefix; else `None`.

    `lacking` are the names that were looked for, also without `prefix`, and `extra` the names of tensors that no leaf
    uses. `call` is the function that takes the prefix as an argument; `""` if none does.
    """
    config = headers.path / CONFIG
    quantization = read_json(config).get("quantization_config") if extra and config.is_file() else None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    marks = [name for name in extra if name.endswith(_QUANTIZED)]
    if marks or (method and not any(hasattr(entry, "scales") for entry in headers.tensors.values())):
        return fail(f"{verb}: {headers.path} is quantized{f' by {method}' if method else ''}",
                    f"it has {(marks or extra)[0]!r}: the values of its weights are in several tensors, not read here",
                    fix="dequantize it first, with the library that wrote it; or give the folder of the model "
                        "before it was quantized")  # fmt: skip
    wanted = {*lacking, *(name.removeprefix(prefix) for name in lacking)}
    for prefixes, has, change in (
        (_prefixes(extra, wanted), "its names begin with {!r}", "name.removeprefix({!r})"),
        (_prefixes(lacking, set(extra)), "its names lack {!r} at their start", "{!r} + name"),
    ):
        for found, count in prefixes.most_common(1):
            if 2 * count >= len(lacking):
                fix = f"{call}(..., prefix={found!r})" if call else _renaming(change.format(found))
                return fail(f"{verb}: {headers.path}: {has.format(found)}", fix=fix)
    wrapped = [name for name in extra if _WRAPPERS.sub("", name) in wanted]
    if not wrapped:
        return None
    part = next(m[0] for m in _WRAPPERS.finditer(wrapped[0]))
    return fail(f"{verb}: {headers.path}: its names have {part!r} inside", f"as {wrapped[0]!r}",
                fix=_renaming(f'name.replace({part!r}, "")'))  # fmt: skip


def _prefixes(names: Sequence[str], wanted: set[str]) -> Counter[str]:
    """Count the prefixes, with a dot at the end, after which one of the names is a wanted one."""
    lengths = {len(name) for name in wanted}
    ends = ((name, i + 1) for name in names for i, c in enumerate(name) if c == "." and len(name) - i - 1 in lengths)
    return Counter(name[:i] for name, i in ends if name[i:] in wanted)


def _renaming(change: str) -> str:
    return f"rename its tensors: {{{change}: x for name, x in tensors.items()}}"


def unsupported_dtype(entry: HeaderEntry) -> ShardingError:
    return fail(f"{entry.file}: {entry.name!r} has dtype {entry.dtype_name!r}, which is not supported",
                fix=f"convert it to one of {', '.join(DTYPES)}")  # fmt: skip


def _no_weights(path: AnyPath) -> ShardingError:
    if not exists(path):
        return fail(f"{path}: there is no such folder", fix=_SAVED)
    if not path.is_dir():
        return fail(f"{path}: is neither a file nor a folder", fix=_SAVED)
    names = sorted(f.name for f in path.iterdir())
    pickles = [n for n in names if n.endswith(PICKLES)]
    others = [n for n in names if n.endswith(SUFFIX)]
    if pickles and not others:
        return _refuse_pickles(path, pickles)
    if ADAPTER in names:
        return fail(f"{path}: has the adapters of peft, and not the weights of the base model",
                    f"it holds {', '.join(others)}",
                    fix="give the folder of the base model, and read the adapters by fs.peft.load; or, into a module "
                        "that peft has wrapped, by fs.peft.weights")  # fmt: skip
    return fail(f"{path}: has neither {SINGLE} nor {INDEX}", f"it holds {', '.join(others) or 'no safetensors'}",
                fix="give one of these files" if others else _SAVED)  # fmt: skip


def _refuse_pickles(path: AnyPath, names: list[str]) -> ShardingError:
    return fail(f"{path}: pickles are refused", f"it has {', '.join(names)}; a pickle runs any code that is in it",
                "fs.state_dict.read reads one file of tensors, or an index, and runs nothing",
                fix="convert it on a machine that may run that: "
                    "AutoModel.from_pretrained(a).save_pretrained(b)")  # fmt: skip


def config_path(folder: StrPath, name: str = CONFIG) -> AnyPath:
    """Return the path of a folder's config; a path that ends in .json is the config itself."""
    path = as_path(folder)
    return path if path.suffix == ".json" else path / name


@checked
def config_of(folder: StrPath, name: str = CONFIG) -> dict[str, Any]:
    """Read `config.json` of a folder, or the config of another name, or at a path that ends in .json.

    >>> config_of("my-gpt2")["model_type"]
    'gpt2'

    Raises ShardingError if there is none, or it is not a JSON object.
    """
    path = config_path(folder, name)
    if not is_file(path):
        if path.name == CONFIG and (path.parent / ADAPTER_CONFIG).is_file():
            raise fail(f"{path}: there is no such file", "the folder has the adapters of peft",
                       fix="give the folder of the base model; fs.peft.load reads adapters")  # fmt: skip
        raise fail(f"{path}: there is no such file", fix=_SAVED)
    return read_json(path)


@checked
def read_json(path: StrPath) -> dict[str, Any]:
    """Read a JSON object. Raises ShardingError if the file holds none."""
    path = as_path(path)
    with open_file(path) as f:
        text = f.read()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise fail(f"{path}: is not JSON", str(e), fix="copy it again") from e
    if not isinstance(value, dict):
        raise fail(f"{path}: is not a JSON object", f"it is a {type(value).__name__}", fix="copy it again")
    return value

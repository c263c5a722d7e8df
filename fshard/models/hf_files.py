"""The files of a model in a Hugging Face folder: `config.json` as a `Config`, and tensors as the leaves of our tree."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from typing import Any

from fshard import tree
from fshard._core.files.io import StrPath
from fshard.errors import ShardingError, checked, fail
from fshard.interop.hf import FileTensor, WeightHeaders, config_of, config_path, read, write

from .transformer import check_config

Get = Callable[[StrPath], Any]
_LAYERS = ("n_layer", "num_layers", "num_hidden_layers", "depths", "num_local_experts")  # numbers of parts of a model
_MAX_LAYERS = 1_000  # as many as the deepest published transformer has


@dataclass(frozen=True)
class ModelFile:
    """Names and shapes by which a folder of Hugging Face stores a model.

    Args:
        config_class: the class of its configs.
        init: its function from a config to the described parameters.
        tensor: path of a leaf -> its tensor in the file.
        kind: the start of the names of its classes in transformers, "GPT2"; `suffix`: the end of the model's class, or
            a function from a config to it.
        prefix: of the names of tensors, which files of a model without a head may lack.
        fixed: the options that every config.json has, or lacks; None: it may have this one only with the value None.
        absent: tokens of a config.json that lacks them, as transformers has them, unless the vocabulary lacks them too.
        ignored: ends of the names of tensors that are not read: buffers of older versions.
        tied: another name of a tensor -> its name here; names in `heads` only if the config ties the head.
        other_fields: contents of config.json -> fields of the config that have another name there.
        sizes: config -> its fields as config.json has them.
        name_in: (name, all names in a file) -> the name of a tensor in this file.
        completed: (config, headers of a folder) -> the config with what only the tensors show.
    """

    config_class: type
    init: Callable[[Any], Any]
    tensor: Callable[[tree.Path], FileTensor]
    _: KW_ONLY
    kind: str
    fixed: Mapping[str, Any]
    suffix: str | Callable[[Any], str] = "ForCausalLM"
    prefix: str = ""
    absent: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ("lm_head.weight",)
    other_fields: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    sizes: Callable[[Any], dict[str, Any]] = asdict
    name_in: Callable[[str, Collection[str]], str] = lambda name, names: name
    completed: Callable[[Any, WeightHeaders], Any] = lambda cfg, headers: cfg

    def read_config(self, folder: StrPath, **others: Any) -> Any:
        """Read a config from `config.json`, or from another .json file; `others` replace fields of it.

        Raises ShardingError listing every option with another value, every field of another type, or a missing
        `model_type`.
        """
        cls, fixed, config, where = self.config_class, self.fixed, config_of(folder), config_path(folder)
        others = {**self.other_fields(config), **others}
        different = [f"{name}: {config.get(name)!r}, not {want!r}" for name, want in fixed.items()
                     if config.get(name, None if name == "model_type" else want) != want]  # fmt: skip
        if different:
            raise fail(f"{where}: not a supported {fixed['model_type']}", *different,
                       fix="use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))")  # fmt: skip
        size = config.get("vocab_size")
        tokens = {name: n for name, n in self.absent.items() if not isinstance(size, int) or n < size}
        config = tokens | config
        values = {f.name: config[f.name] for f in fields(cls) if f.name in config} | others
        values |= {name: None for name, token in values.items() if name.endswith("_token_id") and token == -1}
        hints = typing.get_type_hints(cls)
        values = {name: tuple(x) if isinstance(x, list) and _has_type((), hints[name]) else x
                  for name, x in values.items()}  # fmt: skip
        wrong = [f"{name}: {value!r}" for name, value in values.items() if not _has_type(value, hints[name])]
        if wrong:
            raise fail(f"{where}: has values of the wrong kind", *wrong, fix="copy it again")
        counts = {name: sum(n) if isinstance(n := values[name], tuple) else n for name in _LAYERS if values.get(name)}
        if math.prod(counts.values()) > _MAX_LAYERS:  # each is a node of the tree, which would fill the memory
            raise fail(f"{where}: describes more than {_MAX_LAYERS:,} layers",
                       " * ".join(f"{n:,} {name}" for name, n in counts.items()),
                       fix="copy it again; or cls(num_layers), of the model file, for so deep a model")  # fmt: skip
        try:
            return cls(**values)
        except ShardingError:
            raise
        except Exception as e:  # of arithmetic with values that have the right types
            raise fail(f"{where}: describes no model", f"{type(e).__name__}: {e}",
                       fix="copy it again") from e  # fmt: skip

    def file_config(self, cfg: Any, suffix: str | None = None) -> dict[str, Any]:
        """Return the contents of config.json for the model, or for a class of transformers with another `suffix`."""
        if suffix is None:
            suffix = self.suffix if isinstance(self.suffix, str) else self.suffix(cfg)
        fixed = {name: x for name, x in self.fixed.items() if x is not None}
        return {"architectures": [f"{self.kind}{suffix}"], **fixed, **self.sizes(cfg)}


def file_functions(file: ModelFile) -> tuple[Callable[[tree.Path], FileTensor], Get, Get, Callable[..., None]]:
    """Make the functions `theirs, config, load, save` of a model."""

    @checked
    def theirs(path: tree.Path) -> FileTensor:
        """Return the Hugging Face file tensor of the leaf at a path.

        >>> gpt2.theirs(("h", 3, "up", "w"))
        FileTensor(name='transformer.h.3.mlp.c_fc.weight', dims=None, at=None)

        Raises ShardingError for a path at which the model has no leaf.
        """
        return file.tensor(path)

    @checked
    def config(folder: StrPath, **options: Any) -> Any:
        """Read a `Config` from the `config.json` of a folder, or from a .json file; `options` replace fields of it.

        >>> gpt2.config("my-gpt2") == cfg
        True

        Raises ShardingError for another type of model, and for a ResNet that was trained as a regression or for several
        classes at once.
        """
        names = [f.name for f in fields(file.config_class)]
        if unknown := [name for name in options if name not in names]:
            raise fail(f"config: there is no field {', '.join(unknown)}", fix=f"one of {', '.join(names)}")
        return file.read_config(folder, **options)

    @checked
    def load(path: StrPath) -> tuple[Any, Any]:
        """Return the config and the described parameters of a folder of `save_pretrained`; placing them reads them.

        >>> cfg, weights = gpt2.load("my-gpt2")
        >>> params = fs.materialize(weights, gpt2.specs(cfg, model="model"), mesh, key=fs.key(0))

        Raises ShardingError listing every tensor that is missing, of another shape, or not part of the model.
        """
        found, headers = file.read_config(path), WeightHeaders(path)
        cfg = file.completed(found, headers)

        def in_this_file(path: tree.Path) -> FileTensor:
            tensor = file.tensor(path)
            return replace(tensor, name=file.name_in(tensor.name, headers.tensors))

        untied = () if getattr(cfg, "tie_word_embeddings", True) else file.heads
        copies = {name: of for name, of in file.tied.items() if name not in untied}
        return cfg, read(headers, file.init(cfg), in_this_file, prefix=file.prefix, ignored=file.ignored, copies=copies)

    @checked
    def save(
        path: StrPath, cfg: Any, params: Any, *, like: StrPath | None = None, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write a folder that `from_pretrained` reads; `params` may be placed on a mesh. `like`: see `hf.save`.

        >>> gpt2.save("again", cfg, params)
        >>> gpt2.config("again") == cfg
        True
        """
        check_config("save", cfg, file.config_class)
        write(path, params, file.tensor, config=file.file_config(cfg), described=file.init(cfg), like=like,
              max_shard_bytes=max_shard_bytes)  # fmt: skip

    # peft's default targets are by the type of the model: `fs.peft.load(..., of=t5.theirs)`.
    vars(theirs)["model_type"] = file.config_class.__module__.rpartition(".")[2]
    return theirs, config, load, save


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

"""Hugging Face folders by slices: a model by the type in its config, or the leaves of any described module.

cfg, params = hf.load("my-llama")                          # described leaves of fs.models.llama: headers are read
params = fs.materialize(params, specs, mesh, key=key)      # each rank reads its bytes
hf.save("again", cfg, params)                              # each rank writes its bytes

apply, module = fs.defer(lambda: AutoModel.from_config(config))
values = hf.weights("folder", module, of=apply)            # the module's leaves, by their names in the files
ids = hf.generate(apply, params, {}, ids, new=20, **hf.generation_options("folder"))     # full leaves, in shard_map
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from fshard import models, tree
from fshard._core.files.io import StrPath
from fshard._core.files.url import as_path
from fshard.defer import Apply, generate
from fshard.errors import checked, fail, raise_all
from fshard.interop.hf import CONFIG, config_of, generation_options, write
from fshard.interop.hf.module import by_name, read_module, write_module
from fshard.mesh import Mesh
from fshard.spec import is_spec, spec_errors


@checked
def load(path: StrPath, specs: Any = None, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """Return the config and the described parameters of a folder, by the model file of its `model_type`.

    The leaves are `Deferred`: `materialize` reads, on every rank, the bytes of its part. With `specs`, a tree (or a
    prefix) or a function from the config to one, and a `mesh`, every leaf is checked against its spec.

    >>> cfg, params = hf.load("my-gpt2", lambda cfg: gpt2.specs(cfg, model="model"), mesh)
    >>> params["ln_f"]["w"]
    f32[16] = stored(model.safetensors: transformer.ln_f.weight)

    Raises ShardingError listing every tensor that is missing, extra, cut short or of another shape, and every leaf that
    does not fit its spec; for pickles; and for a model_type without a model file.
    """
    contents = config_of(path)
    model = model_of(contents)
    if model is None:
        raise fail(f"{as_path(path) / CONFIG}: there is no model file for {contents.get('model_type')!r}",
                   models=", ".join(models.ARCHITECTURES),
                   fix="apply, module = fs.defer(lambda: AutoModel.from_config(config)); "
                       "hf.weights(path, module, of=apply)")  # fmt: skip
    if (specs is None) != (mesh is None):
        raise fail("load: specs and mesh are checked against each other", fix="give both, or neither")
    cfg, params = model.load(path)
    if mesh is not None:
        specs = specs(cfg) if callable(specs) and not is_spec(specs) else specs
        flat = tree.broadcast(specs, params, name="specs", leaf=is_spec)
        raise_all([e for (leaf_path, leaf), spec in zip(tree.leaves_with_path(params), flat, strict=True)
                   for e in spec_errors(f"load: {tree.show('params', leaf_path)}", leaf.shape, spec,
                                     mesh.axes)])  # fmt: skip
    return cfg, params


@checked
def weights(
    path: StrPath, described: Any, *, of: Apply | None = None, prefix: str = "", ignored: Sequence[str] = (),
    missing: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Return the leaves of a described module with their values in a folder: each rank will read only its bytes.

    The dtypes are the file's. `described` is the tree that `fs.defer` returned, or only its params or buffers.

    Args:
        of: the function that `fs.defer` returned with it. It knows the module's ties (the file may have any or all of
            their names, with equal values), its buffers (only persistent ones are stored), and, for a model of
            transformers, the names and shapes that the library converts between a module and its files. A module that
            peft has wrapped reads the folder of its base model. Without it names are those in the file.
        prefix: names are looked up unchanged, without this prefix (`"transformer."`), and with it. If all that is read
            begins with it, what is outside of it in the folder is left.
        ignored: names of tensors that are not read: their ends, or globs (`"cls.*"`).
        missing: names of leaves that keep their initializers if the folder does not have them: ends, or globs.

    >>> apply, module = fs.defer(lambda: torch.nn.LayerNorm(16))
    >>> hf.weights("my-gpt2", module["params"], prefix="transformer.ln_f.", ignored=("weight", "bias"))["bias"]
    f32[16] = stored(model.safetensors: transformer.ln_f.bias)

    Raises ShardingError, before any value is read, listing every tensor that is missing, extra, cut short or of another
    shape, and naming the arguments with which the folder is accepted; for folders of adapters, and pickles.
    """
    return read_module(path, described, of, prefix=prefix, ignored=ignored, missing=missing)


@checked
def save(
    path: StrPath, cfg: Any, params: Any, *, of: Apply | None = None, like: StrPath | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:  # fmt: skip
    """Write a folder that `from_pretrained` reads; every rank writes its bytes.

    `cfg` is the `Config` of a model in `fs.models`, or, for a module's leaves by their dotted names, the contents of
    config.json. Leaves are `Sharded`, on any mesh, or tensors that are the same on every rank. The dtype in config.json
    becomes the leaves', the one of most numbers if they have several.

    Args:
        like: a folder of the same type of model, such as the one that was loaded. Its tokenizer,
            generation_config.json, processors, code and licence are copied, and the keys of its config.json that
            `cfg` lacks. Tokens that differ from its config.json replace the tokens of generation_config.json too.

    `of` is the function that `fs.defer` returned with a module: with it `params` may be the full tree, with buffers
    (without those that are not persistent), and the leaves of a model of transformers are written under
    the names and in the shapes that its `save_pretrained` gives them.

    >>> cfg, params = hf.load("my-gpt2")
    >>> hf.save("again", cfg, fs.materialize(params, P("model"), mesh, key=fs.key(0)), like="my-gpt2")

    Raises ShardingError if `cfg` is not a Config of `fs.models`, and where its model's `save` does.
    """
    if isinstance(cfg, Mapping):
        if of is None:
            write(path, params, by_name(params), config=cfg, like=like, max_shard_bytes=max_shard_bytes)
        else:
            write_module(path, params, of, config=cfg, like=like, max_shard_bytes=max_shard_bytes)
        return
    known = [getattr(models, name) for name in (*models.ARCHITECTURES, "heads")]
    model = next((m for m in known if isinstance(cfg, m.Config)), None)
    if model is None:
        raise fail(f"save: {type(cfg).__name__} is not a Config of fs.models", models=", ".join(models.ARCHITECTURES),
                   fix="for a module, pass config.to_dict()")  # fmt: skip
    model.save(path, cfg, params, like=like, max_shard_bytes=max_shard_bytes)


_ALSO = {"mt5": "t5", "umt5": "t5"}  # types of config that a model file of another name has too


def model_of(config: Mapping[str, Any]) -> ModuleType | None:
    """Return the module of `fs.models` for the contents of a config.json: `heads` for a classifier."""
    if models.heads.has_head(config):
        return models.heads
    kind = _ALSO.get(str(config.get("model_type")), config.get("model_type"))
    return getattr(models, str(kind)) if kind in models.ARCHITECTURES else None


__all__ = ["generate", "generation_options", "load", "save", "weights"]

"""Mistral as pure functions: Llama with a sliding window, after which tokens are no longer attended to.

Source: Jiang et al., 2023, "Mistral 7B"; weights as in Hugging Face `MistralForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fshard._core.files.io import StrPath
from fshard.errors import checked
from fshard.interop.hf import config_of, write
from fshard.nn import rope

from . import llama
from .decoding import Cache
from .hf_files import read_config
from .llama import apply, init, specs, states, theirs
from .transformer import Layout, generate_of, loss_of


@checked
@dataclass(frozen=True)
class Config(llama.BaseConfig):
    """Sizes and rates, named as in Hugging Face's `MistralConfig`.

    A token attends to itself and the `sliding_window` - 1 tokens before it; None: to all.

    >>> Config(num_hidden_layers=2).windows
    [4096, 4096]
    """

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer, in tokens; None attends to all before."""
        return [self.sliding_window] * self.num_hidden_layers


loss = loss_of(apply, Config)
generate = generate_of(apply, Config)

_FIXED = {"model_type": "mistral", "layer_types": None}
_ABSENT = {"bos_token_id": 1, "eos_token_id": 2}  # of a config.json without them


@checked
def config(folder: StrPath) -> Config:
    """Read a `Config` from the `config.json` of a folder. Raises ShardingError for another type of model.

    >>> config("my-mistral") == cfg
    True
    """
    return read_config(folder, Config, _FIXED, _ABSENT, rope_parameters=rope.parameters(config_of(folder)))


@checked
def load(path: StrPath) -> tuple[Config, Any]:
    """The config and the described parameters of a folder written by `save_pretrained`; see `llama.load`.

    >>> cfg, weights = load("my-mistral")
    >>> params = fs.materialize(weights, specs(cfg, model="model"), mesh, key=fs.key(0))
    """
    cfg = config(path)
    return cfg, llama.read_weights(path, cfg)


@checked
def save(
    path: StrPath, cfg: Config, params: Any, *, like: StrPath | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write a folder that `MistralForCausalLM.from_pretrained` reads; `params` may be placed on a mesh.

    `like`: see `hf.save`.

    >>> save("again", cfg, params)
    >>> config("again") == cfg
    True
    """
    write(path, params, theirs, config=file_config(cfg, "MistralForCausalLM"),
          like=like, max_shard_bytes=max_shard_bytes, described=init(cfg))  # fmt: skip


def file_config(cfg: Config, kind: str) -> dict[str, Any]:
    """The contents of config.json for a class of transformers."""
    return llama.file_config(cfg, kind, _FIXED)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip

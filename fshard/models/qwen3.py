"""Qwen 3 as pure functions: Llama with normalized queries and keys, and sliding windows in some layers.

Source: Yang et al., 2025, "Qwen3 technical report"; weights as in Hugging Face `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fshard._core.files.io import StrPath
from fshard.errors import checked
from fshard.interop.hf import config_of, write
from fshard.nn import rope

from . import llama, qwen2
from .decoding import Cache
from .hf_files import read_config
from .llama import apply, init, specs, states, theirs
from .transformer import Layout, generate_of, loss_of


@checked
@dataclass(frozen=True)
class Config(qwen2.BaseConfig):
    """Sizes and rates, named as in Hugging Face's `Qwen3Config`; see `qwen2.BaseConfig` for the sliding window.

    >>> Config(hidden_size=1024, num_attention_heads=16).width
    128
    """

    head_dim: int | None = 128
    attention_bias: bool = False

    @property
    def biased(self) -> tuple[str, ...]:
        """The linear layers of a block that have a bias."""
        return ("q", "k", "v", "proj") * self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """True: each head of queries and keys is normalized before its rotation."""
        return True


loss = loss_of(apply, Config)
generate = generate_of(apply, Config)

_FIXED = {"model_type": "qwen3"}


@checked
def config(folder: StrPath) -> Config:
    """Read a `Config` from the `config.json` of a folder. Raises ShardingError for another type of model.

    >>> config("my-qwen3") == cfg
    True
    """
    return read_config(folder, Config, _FIXED, rope_parameters=rope.parameters(config_of(folder)))


@checked
def load(path: StrPath) -> tuple[Config, Any]:
    """The config and the described parameters of a folder written by `save_pretrained`; see `llama.load`.

    >>> cfg, weights = load("my-qwen3")
    >>> params = fs.materialize(weights, specs(cfg, model="model"), mesh, key=fs.key(0))
    """
    cfg = config(path)
    return cfg, llama.read_weights(path, cfg)


@checked
def save(
    path: StrPath, cfg: Config, params: Any, *, like: StrPath | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write a folder that `Qwen3ForCausalLM.from_pretrained` reads; `params` may be placed on a mesh.

    `like`: see `hf.save`.

    >>> save("again", cfg, params)
    >>> config("again") == cfg
    True
    """
    write(path, params, theirs, config=file_config(cfg, "Qwen3ForCausalLM"),
          like=like, max_shard_bytes=max_shard_bytes, described=init(cfg))  # fmt: skip


def file_config(cfg: Config, kind: str) -> dict[str, Any]:
    """The contents of config.json for a class of transformers."""
    return {**llama.file_config(cfg, kind, _FIXED), "head_dim": cfg.width}  # where it is missing, theirs is 128


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip

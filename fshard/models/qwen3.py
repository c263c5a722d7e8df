"""Qwen 3 as pure functions: Llama with normalized queries and keys, and sliding windows in some layers.

Source: Yang et al., 2025, "Qwen3 technical report"; weights as in Hugging Face `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fshard.errors import checked

from . import qwen2
from .hf_files import file_functions
from .kv_cache import Cache
from .llama import apply, init, specs, states
from .transformer import Layout, functions_of


@checked
@dataclass(frozen=True)
class Config(qwen2.BaseConfig):
    """Sizes and rates, named as in Hugging Face's `Qwen3Config`; see `qwen2.BaseConfig` for the sliding window.

    >>> Config(hidden_size=1024, num_attention_heads=16).width
    128
    """

    qk_norm: ClassVar[bool] = True
    head_dim: int | None = 128
    attention_bias: bool = False


loss, generate = functions_of(apply, Config)

FILE = replace(
    qwen2.FILE, config_class=Config, kind="Qwen3", fixed={"model_type": "qwen3"},
    sizes=lambda cfg: {**qwen2.FILE.sizes(cfg), "head_dim": cfg.width},  # 128 where it is missing
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip

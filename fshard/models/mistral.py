"""Mistral as pure functions: Llama with a sliding window, after which tokens are no longer attended to.

Source: Jiang et al., 2023, "Mistral 7B"; weights as in Hugging Face `MistralForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fshard.errors import checked

from . import llama
from .hf_files import file_functions
from .kv_cache import Cache
from .llama import apply, init, specs, states
from .transformer import Layout, functions_of


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


loss, generate = functions_of(apply, Config)

FILE = replace(llama.FILE, config_class=Config, kind="Mistral", fixed={"model_type": "mistral", "layer_types": None})
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip

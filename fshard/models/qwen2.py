"""Qwen 2 and 2.5 as pure functions: Llama with biases of queries, keys and values, and sliding windows in some layers.

Source: Yang et al., 2024, "Qwen2 technical report"; weights as in Hugging Face `Qwen2ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fshard.errors import checked, fail, raise_all

from . import llama
from .hf_files import file_functions
from .kv_cache import Cache
from .llama import apply, init, specs, states
from .transformer import Layout, functions_of


@dataclass(frozen=True)
class BaseConfig(llama.BaseConfig):
    """The options that Qwen 2 and 3 share.

    With `use_sliding_window`, layers from `max_window_layers` on have a `sliding_window`: a token attends to itself and
    the `sliding_window` - 1 tokens before it. `layer_types` states it for each layer instead, "full_attention" or
    "sliding_attention".
    """

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds, n, verb = self.layer_types, self.num_hidden_layers, f"{type(self).__module__.rpartition('.')[2]}.Config"
        if kinds is None:
            return
        errors = [fail(f"{verb}: layer_types has {kind!r}", fix="full_attention or sliding_attention")
                  for kind in dict.fromkeys(kinds) if kind not in ("full_attention", "sliding_attention")]  # fmt: skip
        if len(kinds) != n:
            errors.append(fail(f"{verb}: layer_types has {len(kinds)} entries for {n} layers", fix="one for each"))
        if "sliding_attention" in kinds and (self.sliding_window is None or not self.use_sliding_window):
            errors.append(fail(f"{verb}: layer_types has 'sliding_attention', and there is no window",
                               use_sliding_window=self.use_sliding_window, sliding_window=self.sliding_window,
                               fix="use_sliding_window=True, and a sliding_window"))  # fmt: skip
        raise_all(errors)


@checked
@dataclass(frozen=True)
class Config(BaseConfig):
    """Sizes and rates, named as in Hugging Face's `Qwen2Config`; see `BaseConfig` for the sliding window.

    >>> Config(num_hidden_layers=3, use_sliding_window=True, max_window_layers=2).windows
    [None, None, 4096]
    """

    @property
    def biased(self) -> tuple[str, ...]:
        return ("q", "k", "v")


loss, generate = functions_of(apply, Config)

FILE = replace(
    llama.FILE, config_class=Config, kind="Qwen2", absent={}, fixed={"model_type": "qwen2", "use_mrope": False}
)
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "save", "specs",
           "states", "theirs"]  # fmt: skip

"""Qwen 3 with experts as pure functions: Qwen 3's attention, Mixtral's experts.

Source: Yang et al., 2025, "Qwen3 technical report"; weights as in Hugging Face `Qwen3MoeForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fshard.errors import checked

from . import llama, mixtral
from .hf_files import file_functions
from .kv_cache import Cache
from .mixtral import apply, init, losses, specs, states
from .transformer import Layout, functions_of


@dataclass(frozen=True)
class BaseConfig(mixtral.BaseConfig):
    """The options that Qwen 3 and its relatives with experts share."""

    qk_norm: ClassVar[bool] = True
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    attention_bias: bool = False
    sliding_window: int | None = 4096


@checked
@dataclass(frozen=True)
class Config(BaseConfig):
    """Sizes and rates, named as in Hugging Face's `Qwen3MoeConfig`.

    The layers in `mlp_only_layers`, and all but each `decoder_sparse_step`-th, have an MLP in the place of experts.

    >>> qwen3_moe.Config(num_hidden_layers=3, decoder_sparse_step=2).experts.dense_layers
    frozenset({0, 2})
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    num_experts_per_tok: int = 8
    num_experts: int = 128
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    use_sliding_window: bool = False

    @property
    def experts(self) -> mixtral.Experts:
        step, layers = self.decoder_sparse_step, range(self.num_hidden_layers)
        dense = frozenset(i for i in layers if i in self.mlp_only_layers or (i + 1) % step)
        return mixtral.Experts(self.num_experts, self.moe_intermediate_size, dense_layers=dense)


loss, generate = functions_of(apply, Config, losses)

LEAVES = mixtral.leaves("mlp.experts.*", "mlp.gate", "gate_proj", "up_proj", "down_proj")


def _other_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have other names in config.json: transformers writes `num_experts` as Mixtral's name."""
    experts = {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    return {**llama.rotary(config), **experts}


FILE = replace(
    llama.FILE, config_class=Config, init=init, absent={}, kind="Qwen3Moe", fixed={"model_type": "qwen3_moe"},
    other_fields=_other_fields, tensor=LEAVES.tensor,
)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "losses", "save",
           "specs", "states", "theirs"]  # fmt: skip

"""dots.llm1 as pure functions: Qwen 3's attention, and DeepSeek-V3's experts.

Sigmoids choose the experts, with a bias that balances them, from the best groups; every token also goes to shared
experts. Source: Huo et al., 2025, "dots.llm1 technical report"; DeepSeek-AI, 2024, "DeepSeek-V3"; weights as in Hugging
Face `Dots1ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fshard import nn
from fshard.errors import checked

from . import llama, mixtral, qwen3_moe
from .hf_files import file_functions
from .kv_cache import Cache
from .mixtral import apply, init, losses, specs, states
from .transformer import Layout, functions_of


@checked
@dataclass(frozen=True)
class Config(qwen3_moe.BaseConfig):
    """Sizes and rates, named as in Hugging Face's `Dots1Config`; the first layers have an MLP in the place of experts.

    >>> dots1.Config(n_shared_experts=2).experts.shared
    2816
    """

    vocab_size: int = 152064
    hidden_size: int = 4608
    intermediate_size: int = 10944
    num_hidden_layers: int = 62
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1408
    n_shared_experts: int = 2
    n_routed_experts: int = 128
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 0
    routed_scaling_factor: float = 1.0
    max_window_layers: int = 62
    layer_types: tuple[str, ...] | None = None

    @property
    def experts(self) -> mixtral.Experts:
        """Sizes of the experts, whose biases balance them."""
        shared = self.n_shared_experts * self.moe_intermediate_size
        return mixtral.Experts(self.n_routed_experts, self.moe_intermediate_size, shared,
                               frozenset(range(self.first_k_dense_replace)), biased=True)  # fmt: skip

    def route(self, logits: Tensor, bias: Tensor | None) -> nn.Routing:
        routing = nn.route(logits, self.num_experts_per_tok, score="sigmoid", bias=bias,
                           groups=(self.n_group, self.topk_group), renormalize=self.norm_topk_prob)  # fmt: skip
        return routing._replace(weights=routing.weights * self.routed_scaling_factor)


loss, generate = functions_of(apply, Config, losses)

FILE = replace(llama.FILE, config_class=Config, init=init, absent={}, kind="Dots1", fixed={"model_type": "dots1"},
               tensor=qwen3_moe.LEAVES.tensor)  # fmt: skip
theirs, config, load, save = file_functions(FILE)


__all__ = ["Cache", "Config", "Layout", "apply", "config", "generate", "init", "load", "loss", "losses", "save",
           "specs", "states", "theirs"]  # fmt: skip

"""One file per architecture: `Config, init, specs, apply, loss, generate, load, save`; and `heads` on any of them."""

from . import bert, gpt2, gpt_neox, gptj, llama, mistral, mixtral, qwen2, qwen3, resnet, t5
from . import heads as heads  # not a model of its own

__all__ = ["bert", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "qwen2", "qwen3", "resnet", "t5"]

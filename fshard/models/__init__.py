"""One file per architecture: `Config, init, specs, apply, loss, generate, load, save`; and `heads` on any of them."""

from . import bert, gpt2, gpt_neox, gptj, heads, llama, mistral, mixtral, qwen2, qwen3, resnet, t5

__all__ = ["bert", "gpt2", "gpt_neox", "gptj", "heads", "llama", "mistral", "mixtral", "qwen2", "qwen3", "resnet", "t5"]

ARCHITECTURES = tuple(name for name in __all__ if name != "heads")  # which is not a model by itself

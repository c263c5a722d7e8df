"""One file per architecture: `Config, init, specs, apply, loss, generate, load, save`; and `heads` on any of them."""

from . import bert, dots1, gpt2, gpt_neox, gptj, heads, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, resnet, t5

__all__ = ["bert", "dots1", "gpt2", "gpt_neox", "gptj", "heads", "llama", "mistral", "mixtral", "qwen2", "qwen3",
           "qwen3_moe", "resnet", "t5"]  # fmt: skip

ARCHITECTURES = tuple(name for name in __all__ if name != "heads")  # which is not a model by itself

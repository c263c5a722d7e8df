"""One file per architecture: `Config, init, specs, apply, loss, generate, load, save`."""

from . import bert, gpt2, gpt_neox, gptj, llama, mistral, mixtral, qwen2, qwen3

__all__ = ["bert", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "qwen2", "qwen3"]

"""One file per architecture: `Config, init, specs, apply, loss, generate, load, save`; `heads` and `stages` of them."""

from . import (
    bert,
    dots1,
    gpt2,
    gpt_neox,
    gptj,
    heads,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
    resnet,
    stages,
    t5,
)

__all__ = ["bert", "dots1", "gpt2", "gpt_neox", "gptj", "heads", "llama", "mistral", "mixtral", "qwen2", "qwen3",
           "qwen3_moe", "resnet", "stages", "t5"]  # fmt: skip

ARCHITECTURES = tuple(name for name in __all__ if name not in ("heads", "stages"))

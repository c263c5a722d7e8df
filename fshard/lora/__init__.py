"""Low-rank adapters as a tree next to any parameter tree: W + s A B, without ever building the sum in forward.

cfg      = fs.lora.Config(targets=("q_proj", "v_proj"), rank=8, alpha=32)
adapters = fs.lora.init(cfg, params, of=llama.theirs)                  # described: {"h.0.q.w": {"a", "b"}, ...}
placed   = fs.lora.specs(cfg, params, specs, of=llama.theirs)          # the specs of the factors, by their base's

inside shard_map, differentiating only `adapters`:
    adapted = fs.lora.apply(cfg, params, adapters, of=llama.theirs, specs=specs, data="data", model="model")
    loss    = llama.loss(model, adapted, ids, targets, layout=layout, specs=specs)

Source: Hu et al., 2021, "LoRA"; names, defaults and arithmetic are as in Hugging Face PEFT.
"""

from fshard._core.weight import Leaf

from .adapters import init, specs
from .config import Config
from .int8 import Int8, dequantize, part_specs, quantize
from .lora_weight import LoraWeight, apply
from .merging import merge, unmerge

__all__ = ["Config", "Int8", "Leaf", "LoraWeight", "apply", "dequantize", "init", "merge", "part_specs", "quantize",
           "specs", "unmerge"]  # fmt: skip

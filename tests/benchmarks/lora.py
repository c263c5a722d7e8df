"""Adapters beside FSDP2 with peft: `python -m tests.benchmarks.lora [--only NAME ...] [--repeats 9]`.

T5, GPT-2 and Llama train LoRA of rank 8 on their attention, beside a frozen and sharded base, in two processes over
gloo: the module of peft through `fully_shard` of each block and then of the model; the same through
`fs.defer(units=)`; and the model of fshard with `fs.lora`. Same values, batches and fused AdamW. README.md in this
folder describes the report.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
from torch import nn

from . import units
from .units import LOSSES, Model, fsdp2_step, report, run, units_step

LIMITS = {"time": 0.9, "live": 0.9}


def _adapted(constructor: Callable[[], nn.Module], targets: list[str]) -> nn.Module:
    return peft.get_peft_model(constructor(), peft.LoraConfig(r=8, lora_alpha=32, target_modules=targets))  # type: ignore[arg-type]


TARGETS = {"t5": ["q", "v"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
MODELS: dict[str, Model] = {
    name: replace(units.MODELS[name], constructor=functools.partial(_adapted, units.MODELS[name].constructor, targets))
    for name, targets in TARGETS.items()
}


def main(argv: list[str] | None = None) -> int:
    def found(name: str, repeats: int, measures: list[str]) -> dict[str, Any]:
        model = MODELS[name]
        builders = {"fsdp2": functools.partial(fsdp2_step, model), "units": functools.partial(units_step, model)}
        return report(name, builders, LIMITS, repeats, measures)

    return run(argv, __doc__, found, dict.fromkeys(MODELS, LOSSES["float32"]))


if __name__ == "__main__":
    sys.exit(main())

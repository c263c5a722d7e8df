"""Modules of transformers gathered by block, beside FSDP2: `python -m tests.benchmarks.units [--only NAME ...]`.

T5 (all leaves, and peft's LoRA), GPT-2 and Llama train in two processes over gloo, through `fs.defer(units=)` and
through `fully_shard` of each block and then of the model; same values, batches, dtypes and fused AdamW. README.md in
this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fshard as fs
from fshard import P

from .init import MIB, spread
from .peers import distance, ratios, run_on_ranks
from .step_cost import measure_step

LR = 3e-4
WARMUP = 3
BATCHES = 4
LIMITS = {"time": 0.95, "live": 1.0}
LOSSES = {"float32": 1e-4, "bfloat16": 1e-2}
MIXED = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}

Step = Callable[[int], Tensor]  # from its number to the loss
Built = tuple[Step, int]  # and the bytes of this rank's shards: parameters, and both moments of those that train


@dataclass(frozen=True)
class Model:
    """A constructor, the class of its blocks, and the rows and tokens of each rank's batch."""

    constructor: Callable[[], nn.Module]
    block: str
    rows: int = 4
    tokens: int = 128
    vocab: int = 4096
    mixed: bool = False
    remat: bool = False


def _t5() -> nn.Module:
    config = hf.T5Config(vocab_size=4096, d_model=512, d_kv=64, d_ff=1024, num_layers=6, num_heads=8, dropout_rate=0.0,
                         decoder_start_token_id=0, pad_token_id=0, use_cache=False)  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _t5_lora() -> nn.Module:
    return peft.get_peft_model(_t5(), peft.LoraConfig(r=8, lora_dropout=0.0, target_modules=["q", "v"]))  # type: ignore[arg-type]


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=4096, n_embd=512, n_layer=6, n_head=8, n_positions=256, use_cache=False,
                           embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = hf.LlamaConfig(vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=6,
                            num_attention_heads=8, num_key_value_heads=4, use_cache=False)  # fmt: skip
    return hf.LlamaForCausalLM(config)


MODELS = {
    "t5": Model(_t5, "T5Block"),
    "t5 lora": Model(_t5_lora, "T5Block"),
    "gpt2": Model(_gpt2, "GPT2Block", tokens=256),
    "llama": Model(_llama, "LlamaDecoderLayer", tokens=256),
    "llama mixed": Model(_llama, "LlamaDecoderLayer", tokens=256, mixed=True),
}


def batches(model: Model, ranks: int) -> list[Tensor]:
    """The ids of all ranks in each of a few steps, [B, T]; a few tokens are frequent, as in text."""
    shape = (BATCHES, ranks * model.rows, model.tokens)
    return list((torch.rand(shape, generator=torch.Generator().manual_seed(1)) ** 3 * model.vocab).long().unbind())


def fsdp2_step(model: Model) -> Built:
    torch.manual_seed(0)
    module, ranks = model.constructor(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=MIXED["dtype"], reduce_dtype=MIXED["reduce_dtype"]) if model.mixed else \
        MixedPrecisionPolicy()  # fmt: skip
    for m in list(module.modules()):
        if type(m).__name__ == model.block:
            fully_shard(m, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    trained = [x for x in module.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, fused=True, weight_decay=0.0)
    data = [ids.chunk(ranks)[dist.get_rank()].contiguous() for ids in batches(model, ranks)]

    def step(i: int) -> Tensor:
        ids = data[i % BATCHES]
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach().float()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return step, sum(x.to_local().nbytes * (3 if x.requires_grad else 1) for x in module.parameters())


def units_step(model: Model) -> Built:
    ranks = dist.get_world_size()
    mesh = fs.make_mesh(kind="process", data=ranks)
    apply, tree = fs.defer(model.constructor, units=model.block, reference=0)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    optimizer = fs.optim.adamw(LR, weight_decay=0.0)
    split = lambda named, frozen: {k: x for k, x in named.items() if (k in apply.frozen) == frozen}  # noqa: E731
    trained = split(specs, False)
    placed = {"params": trained, "opt": optimizer.specs(trained)}
    f = apply.unshard(specs, "data", shapes=tree["params"], remat=model.remat, **(MIXED if model.mixed else {}))
    out = (placed, P())

    @fs.shard_map(mesh=mesh, in_specs=(placed, split(specs, True), P(), P("data")), out_specs=out, donate=0)
    def train(state: Any, frozen: Any, buffers: Any, ids: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return fs.pmean(f({**params, **frozen}, buffers, input_ids=ids, labels=ids).loss.float(), "data")

        loss, grads = fs.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, loss

    described = split(tree["params"], False)
    state = fs.materialize({"params": described, "opt": optimizer.init(described)}, placed, mesh, key=fs.key(0))
    frozen = fs.materialize(split(tree["params"], True), split(specs, True), mesh, key=fs.key(0))
    buffers = fs.materialize(tree["buffers"], P(), mesh, key=fs.key(0))
    data = [fs.device_put(ids, P("data"), mesh) for ids in batches(model, ranks)]
    del tree, described

    def step(i: int) -> Tensor:
        nonlocal state
        state, loss = train(state, frozen, buffers, data[i % BATCHES])
        return loss.shards[0]

    nbytes = lambda named: sum(x.shards[0].nbytes for x in named.values())  # noqa: E731
    return step, 3 * nbytes(state["params"]) + nbytes(frozen)


STEPS = {"fsdp2": fsdp2_step, "units": units_step}


def timed(name: str, repeats: int) -> dict[str, Any]:
    """Seconds and losses of both steps, run in turn; warm-up and one more round are not counted."""
    steps = {one: build(MODELS[name])[0] for one, build in STEPS.items()}
    losses = {one: [float(step(i)) for i in range(WARMUP)] for one, step in steps.items()}
    seconds: dict[str, list[float]] = {one: [] for one in steps}
    for i in range(WARMUP, WARMUP + 1 + repeats):
        for one, step in steps.items():
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            loss = step(i)
            if i > WARMUP:
                seconds[one].append(time.perf_counter() - start)
            losses[one].append(float(loss))
    return {"seconds": seconds, "losses": losses}


def live(name: str, one: str) -> dict[str, int]:
    """The bytes live in tensors at a step's peak, above this rank's shards: parameters and both moments; what it sends.

    Not above the bytes at the start of the step, which depend on what the step before left.
    """

    shards = 0

    def setup() -> Callable[[], object]:
        nonlocal shards
        step, shards = STEPS[one](MODELS[name])
        count = iter(range(100))
        return lambda: step(next(count))

    cost = measure_step(setup, warmup=WARMUP)
    sent = cost.sent(dist.get_world_size())
    return {"shards": shards, "start": cost.start, "above": cost.peak - shards, "sent": sent,
            "transfers": len(cost.transfers)}  # fmt: skip


def report(name: str, repeats: int, measures: list[str]) -> dict[str, Any]:
    """Measure one model and print it."""
    out: dict[str, Any] = {}
    print(f"\n{name}", flush=True)
    if "time" in measures:
        rows = run_on_ranks(2, timed, name, repeats)
        seconds = {one: [max(ts) for ts in zip(*(r["seconds"][one] for r in rows), strict=True)] for one in STEPS}
        mean = {one: [sum(xs) / 2 for xs in zip(*(r["losses"][one] for r in rows), strict=True)] for one in STEPS}
        out["time"], out["of medians"] = ratios(seconds["units"], seconds["fsdp2"])
        out["difference"] = distance(mean["units"], mean["fsdp2"])
        out["seconds"] = seconds
        for one, times in seconds.items():
            x = spread(times)
            print(f"  {one:8} seconds: median {x['median']:.3f}, least {x['least']:.3f}, most {x['most']:.3f}")
        print(f"  ratio {out['time']:.3f} (of medians {out['of medians']:.3f}), at most {LIMITS['time']}; "
              f"losses differ by {out['difference']:.1e}")  # fmt: skip
    if "live" in measures:
        for one in STEPS:
            cells = run_on_ranks(2, live, name, one)
            out[one] = {k: max(r[k] for r in cells) for k in cells[0]}
            shown = ", ".join(f"{k} {x / MIB:.1f} MiB" for k, x in out[one].items() if k != "transfers")
            print(f"  {one:8} {shown}, {out[one]['transfers']} transfers")
        out["live"] = out["units"]["above"] / out["fsdp2"]["above"]
        print(f"  ratio of the peaks above the shards {out['live']:.3f}, at most {LIMITS['live']}")
    sys.stdout.flush()
    return out


def main(argv: list[str] | None = None) -> int:
    """Print the report; the exit status is 0 if the losses agree, even if a limit was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.units", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=9, help="counted rounds")
    parser.add_argument("--measure", nargs="+", choices=LIMITS, default=list(LIMITS))
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, transformers {hf.__version__}, peft {peft.__version__}, 2 processes, "
          f"1 thread each, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    gc.freeze()
    found = {name: report(name, args.repeats, args.measure) for name in args.only}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    wrong = [name for name, x in found.items()
             if not x.get("difference", 0.0) <= LOSSES["bfloat16" if MODELS[name].mixed else "float32"]]  # fmt: skip
    for name in wrong:
        print(f"PROBLEM: {name}: the losses differ by {found[name]['difference']:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Modules of transformers gathered by block, beside FSDP2: `python -m tests.benchmarks.units [--only NAME ...]`.

T5, GPT-2, Llama, BERT, Mixtral, Mamba and Whisper train in two processes over gloo, through `fs.defer(units=)` and
through `fully_shard` of each block and then of the model; same values, batches, dtypes and fused AdamW. In the rows
"remat" both recompute each block in backward. README.md in this folder says how to read the report. `lora` is the same
for adapters.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fshard as fs
from fshard import P
from fshard._core.comm.description import _HEADER_BYTES

from . import below_torch
from .init import MIB, spread
from .peers import distance, ratios, run_on_ranks
from .step_cost import counting, measure_step
from .train_steps import optimized

LR = 3e-4
WARMUP = 3
BATCHES = 4
LIMITS = {"time": 0.95, "live": 1.0}
LIMITS_NEW = {"time": 1.0, "live": 0.8}  # of mixtral, mamba and whisper
LOSSES = {"float32": 1e-4, "bfloat16": 1e-2}
MIXED = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}

Step = Callable[[int], Tensor]  # from its number to the loss
Built = tuple[Step, int]  # and the bytes of this rank's shards: parameters, and both moments of those that train
Builders = Mapping[str, Callable[[], Built]]


def ids_and_labels(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Model:
    """A constructor, the class of its blocks, and the rows and tokens of each rank's batch, and the inputs of ids."""

    constructor: Callable[[], nn.Module]
    block: str | tuple[str, ...]
    rows: int = 4
    tokens: int = 128
    vocab: int = 4096
    mixed: bool = False
    remat: bool = False
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)
    inputs: Callable[[Tensor], dict[str, Tensor]] = ids_and_labels


def t5() -> nn.Module:
    config = hf.T5Config(vocab_size=4096, d_model=512, d_kv=64, d_ff=1024, num_layers=6, num_heads=8, dropout_rate=0.0,
                         decoder_start_token_id=0, pad_token_id=0, use_cache=False)  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=4096, n_embd=512, n_layer=6, n_head=8, n_positions=256, use_cache=False,
                           embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = hf.LlamaConfig(vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=6,
                            num_attention_heads=8, num_key_value_heads=4, use_cache=False)  # fmt: skip
    return hf.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = hf.BertConfig(vocab_size=4096, hidden_size=512, num_hidden_layers=6, num_attention_heads=8,
                           intermediate_size=2048, max_position_embeddings=256, hidden_dropout_prob=0.0,
                           attention_probs_dropout_prob=0.0)  # fmt: skip
    return hf.BertForMaskedLM(config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(vocab_size=4096, hidden_size=512, intermediate_size=688, num_hidden_layers=6,
                              num_attention_heads=8, num_key_value_heads=4, num_local_experts=4, use_cache=False
                              )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def mamba() -> nn.Module:
    config = hf.MambaConfig(vocab_size=4096, hidden_size=512, num_hidden_layers=6, state_size=8, use_cache=False)
    return hf.MambaForCausalLM(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(vocab_size=4096, d_model=512, encoder_layers=3, decoder_layers=3,
                              encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=1376,
                              decoder_ffn_dim=1376, max_source_positions=128, max_target_positions=256, pad_token_id=0,
                              bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, use_cache=False)  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def sounds(ids: Tensor) -> dict[str, Tensor]:
    """80 frequencies at two times for each token, [B, 80, 2T]."""
    frequencies = torch.arange(80, dtype=torch.float32, device=ids.device)[:, None]
    return {"input_features": (ids[:, None].repeat(1, 1, 2) * frequencies).sin(), "labels": ids}


MODELS = {
    "t5": Model(t5, "T5Block"),
    "gpt2": Model(gpt2, "GPT2Block", tokens=256),
    "llama": Model(llama, "LlamaDecoderLayer", tokens=256),
    "llama mixed": Model(llama, "LlamaDecoderLayer", tokens=256, mixed=True),
    "bert": Model(bert, "BertLayer", tokens=256),
    "mixtral": Model(mixtral, "MixtralDecoderLayer", tokens=256, limits=LIMITS_NEW),
    "mamba": Model(mamba, "MambaBlock", tokens=32, limits=LIMITS_NEW),
    "whisper": Model(whisper, ("WhisperEncoderLayer", "WhisperDecoderLayer"), limits=LIMITS_NEW, inputs=sounds),
}
MODELS |= {f"{name} remat": replace(MODELS[name], remat=True) for name in ("mixtral", "mamba", "whisper")}


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
    classes = [model.block] if isinstance(model.block, str) else model.block
    blocks = [m for m in module.modules() if type(m).__name__ in classes]
    if model.remat:
        checkpoint_wrapper.apply_activation_checkpointing(module, check_fn=lambda m: m in blocks)
        blocks = [m for m in module.modules() if isinstance(m, checkpoint_wrapper.CheckpointWrapper)]
    for m in blocks:
        fully_shard(m, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    trained = [x for x in module.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, fused=True, weight_decay=0.0)
    data = [ids.chunk(ranks)[dist.get_rank()].contiguous() for ids in batches(model, ranks)]

    def loss_of(i: int) -> Tensor:
        ids = data[i % BATCHES]
        loss: Tensor = module(**model.inputs(ids)).loss
        return loss

    return optimized(loss_of, optimizer), sum(
        x.to_local().nbytes * (3 if x.requires_grad else 1) for x in module.parameters()
    )


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
            return fs.pmean(f({**params, **frozen}, buffers, **model.inputs(ids)).loss.float(), "data")

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


def timed(builders: Builders, repeats: int) -> dict[str, Any]:
    """Seconds and losses of all steps, run in turn; warm-up and one more round are not counted."""
    steps = {one: build()[0] for one, build in builders.items()}
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


def live(build: Callable[[], Built], keeps_buffers: bool) -> dict[str, int]:
    """The most bytes that are live in a step, above those at its start; what it sends.

    A step that `keeps_buffers` from step to step has them in its start: they count, so its peak is above the shards.
    torch's profiler gives the transfers, and not the bytes: it does not see what a thread of gloo frees.
    """
    found = {}

    def setup() -> Callable[[], object]:
        below_torch.begin()
        step, shards = build()
        run = counting(step)
        for _ in range(WARMUP):
            run()
        gc.collect()
        start = below_torch.reset_peak()
        run()
        found.update(shards=shards, start=start, above=below_torch.peak() - (shards if keeps_buffers else start))
        return run

    cost = measure_step(setup, warmup=0)
    # Each transfer of fshard begins with a header, and has a message for each large tensor, in the tensor's memory.
    messages = [nbytes for op, nbytes in cost.transfers if op == "send"]
    transfers = len(cost.transfers) - len(messages) + messages.count(_HEADER_BYTES)
    return {**found, "sent": cost.sent(dist.get_world_size()), "transfers": transfers, "messages": len(messages)}


def report(name: str, builders: Builders, limits: Mapping[str, float], repeats: int,
           measures: list[str]) -> dict[str, Any]:  # fmt: skip
    """Measure the steps of one model, and print them; the ratios are of each to the first."""
    out: dict[str, Any] = {one: {} for one in builders}
    first, *others = builders
    print(f"\n{name}", flush=True)
    if "time" in measures:
        rows = run_on_ranks(2, timed, builders, repeats)
        seconds = {one: [max(ts) for ts in zip(*(r["seconds"][one] for r in rows), strict=True)] for one in builders}
        mean = {one: [sum(xs) / 2 for xs in zip(*(r["losses"][one] for r in rows), strict=True)] for one in builders}
        for one, times in seconds.items():
            x = out[one]["seconds"] = spread(times)
            print(f"  {one:12} seconds: median {x['median']:.3f}, least {x['least']:.3f}, most {x['most']:.3f}")
        for one in others:
            time, of_medians = ratios(seconds[one], seconds[first])
            out[one] |= {"time": time, "of medians": of_medians, "difference": distance(mean[one], mean[first])}
            print(f"  {one:12} time {time:.3f} of {first} (of medians {of_medians:.3f}), at most {limits['time']}; "
                  f"losses differ by {out[one]['difference']:.1e}")  # fmt: skip
    if "live" in measures:
        for one, build in builders.items():
            cells = run_on_ranks(2, live, build, one == "ours")
            out[one] |= {k: max(r[k] for r in cells) for k in cells[0]}
            sizes = ", ".join(f"{k} {out[one][k] / MIB:.1f} MiB" for k in ("shards", "start", "above", "sent"))
            counts = ", ".join(f"{out[one][k]} {k}" for k in ("transfers", "messages") if out[one][k])
            print(f"  {one:12} {sizes}, {counts}")
        for one in others:
            out[one]["live"] = out[one]["above"] / out[first]["above"]
            print(f"  {one:12} peak {out[one]['live']:.3f} of {first}, at most {limits['live']}")
    sys.stdout.flush()
    return out


def run(argv: list[str] | None, doc: str | None, found: Callable[[str, int, list[str]], dict[str, Any]],
        losses: Mapping[str, float]) -> int:  # fmt: skip
    """Print the report of each model; the exit status is 0 if the losses agree, even if a limit was missed."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--only", nargs="+", choices=losses, default=list(losses))
    parser.add_argument("--repeats", type=int, default=9, help="counted rounds")
    parser.add_argument("--measure", nargs="+", choices=LIMITS, default=list(LIMITS))
    args = parser.parse_args(argv)
    if "live" in args.measure:
        below_torch.preload()
        if not below_torch.is_counting():
            parser.error("--measure live counts by a library that gcc compiles, on Linux: --measure time")
    print(f"torch {torch.__version__}, transformers {hf.__version__}, 2 processes, 1 thread each, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
    gc.freeze()
    figures = {name: found(name, args.repeats, args.measure) for name in args.only}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    wrong = [(name, one, x["difference"]) for name, steps in figures.items() for one, x in steps.items()
             if not x.get("difference", 0.0) <= losses[name]]  # fmt: skip
    for name, one, difference in wrong:
        print(f"PROBLEM: {name}: the losses of {one} differ by {difference:.1e}")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    def found(name: str, repeats: int, measures: list[str]) -> dict[str, Any]:
        model = MODELS[name]
        builders = {"fsdp2": functools.partial(fsdp2_step, model), "units": functools.partial(units_step, model)}
        return report(name, builders, model.limits, repeats, measures)

    losses = {name: LOSSES["bfloat16" if model.mixed else "float32"] for name, model in MODELS.items()}
    return run(argv, __doc__, found, losses)


if __name__ == "__main__":
    sys.exit(main())

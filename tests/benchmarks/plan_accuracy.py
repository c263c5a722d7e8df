"""`fs.plan` against real ranks: `python -m tests.benchmarks.plan_accuracy [--only NAME ...] [--every] [--json FILE]`.

Train steps of GPT-2, Llama, T5, a ResNet and a mixture of experts, under data parallel, FSDP in several schedules,
tensor, sequence and context parallel, accumulation and bfloat16, on two processes over gloo; a pipeline in each
schedule, on four; modules of many kinds (`plan_kinds`); and classes of transformers that have no model file. The bytes
of tensors at the peak are read from torch's profiler (`step_cost`), and with the scratch memory of kernels from the C
library (`below_torch`); the transfers from `fs.recording`. The plan is made in the same process, from the same
function. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn
from fshard.cli.module_model import ModuleModel
from fshard.cli.train_step import Job, train_step
from fshard.models import gpt2, llama, mixtral, resnet, t5
from fshard.planning.plan import plan_ranks

from . import below_torch, plan_kinds
from .init import MIB
from .peers import run_on_ranks
from .step_cost import measure_step

WITHIN = 0.03
ROWS, T, VOCAB = 4, 128, 4096  # examples of each rank, tokens, classes


@dataclass(frozen=True)
class Balanced(mixtral.Config):
    """A Mixtral whose tokens choose the experts in turn, as a plan assumes: values decide what else a step needs."""

    def route(self, logits: Tensor, bias: Tensor | None) -> fs.nn.Routing:
        routing = super().route(logits, bias)
        k, (n, e) = self.num_experts_per_tok, logits.shape
        experts = (torch.arange(n * k, device=logits.device) % e).view(n, k)
        return routing._replace(experts=experts, weights=routing.probabilities.gather(1, experts))


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2, gpt2.Config(vocab_size=VOCAB, n_positions=T, n_embd=256, n_layer=4, n_head=4)),
    "llama": (llama, llama.Config(vocab_size=VOCAB, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=T)),
    "t5": (t5, t5.Config(vocab_size=VOCAB, d_model=256, d_kv=64, d_ff=512, num_layers=3, num_heads=4,
                         dropout_rate=0.0)),
    "resnet": (resnet, resnet.Config.of(18, num_labels=VOCAB)),
    "mixtral": (mixtral, Balanced(vocab_size=VOCAB, hidden_size=256, intermediate_size=256, num_hidden_layers=4,
                                  num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)),
}  # fmt: skip
BF16 = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@dataclass(frozen=True)
class Way:
    """A way to train: the mesh axes of two ranks or more, and options of the layout and the step."""

    data: bool = True
    model: bool = False
    context: bool = False
    experts: bool = False
    sharded: bool = False
    layout: dict[str, Any] = field(default_factory=dict)
    remat: bool = False
    offload: bool = False
    steps: int = 1


WAYS = {
    "ddp": Way(),
    "fsdp": Way(sharded=True),
    "keep": Way(sharded=True, layout={"release": False}),
    "remat": Way(sharded=True, remat=True),
    "offload": Way(sharded=True, offload=True),
    "tp": Way(data=False, model=True),
    "tp+sp": Way(data=False, model=True, layout={"sequence": True}),
    "accumulate": Way(sharded=True, steps=2),
    "bf16": Way(sharded=True, layout=BF16),
    "context": Way(data=False, context=True, layout={"context": "seq"}),
    "experts": Way(experts=True, layout={"experts": "data"}),
}
# Images have no dim of time that sequence parallelism could split; "tp" of ResNet splits the classes of the head.
SKIPPED = {
    ("resnet", "tp+sp"), ("resnet", "context"), ("t5", "context"),
    *((name, "experts") for name in MODELS if name != "mixtral"),
    *(("mixtral", way) for way in WAYS if way not in ("context", "experts")),
}  # fmt: skip


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # and the chunks of each


def build_pipeline(schedule: Any, kind: str) -> tuple[Any, ...]:
    """As `build`: blocks of a hidden layer, tied embeddings and AdamW, in 4 stages of 2 blocks, on 8 microbatches."""
    chunks, mesh = SCHEDULES[schedule], fs.make_mesh(kind=kind, stage=4)
    stacked, split = ((2, 4), P(None, "stage")) if chunks == 2 else ((8,), P("stage"))

    def layer(p: Any, h: Tensor, batch: Any) -> Tensor:
        return h + nn.linear(torch.relu(nn.linear(h, p["up"])), p["down"])

    def last(ends: Tensor, h: Tensor, batch: Any) -> Tensor:
        return nn.cross_entropy(h @ ends.mT, batch[1])

    f = fs.pipelined(lambda ends, batch: nn.embedding(batch[0], ends), layer, last, axis="stage", microbatches=8,
                     schedule=schedule, chunks=chunks)  # fmt: skip
    blocks = {"up": fs.init.normal((*stacked, 256, 704)), "down": fs.init.normal((*stacked, 704, 256))}
    params, specs, opt = (fs.init.normal((VOCAB, 256)), blocks), (P(), split), fs.optim.adamw(1e-3)
    placed = {"params": specs, "opt": opt.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(), P()), out_specs=(placed, P()), donate=0)
    def step(state: Any, x: Tensor, y: Tensor) -> Any:
        loss, grads = f(state["params"], (x, y))
        params, new = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": new}, loss

    ids = fs.init.zeros((8, T), dtype=torch.int64)
    return step, ({"params": params, "opt": opt.init(params)}, ids, ids), placed, P()


SIZES = {"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": T}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {  # of transformers, which have no model file: `python -m fshard plan`
    "gemma2": {"head_dim": 64},
    "phi3": {"pad_token_id": 0},
    "deepseek_v3": {"moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
                    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 128,
                    "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
    "qwen3_next": {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                   "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                   "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}  # fmt: skip


def build_module(name: str, kind: str) -> tuple[Any, ...]:
    """As `build`: the step of the command line, with weights gathered in bfloat16."""
    model = ModuleModel({"model_type": name, **SIZES, **MODULES[name]}, name)
    f, args = train_step(Job(model, model.cfg, T), data=2, batch=2 * ROWS)
    return f.on(fs.make_mesh(kind=kind, data=2)), args, f._in_specs[0], f._in_specs[1]


def build(name: str, way: Way, kind: str) -> tuple[Any, tuple[Any, ...]]:
    """The step, (state, *batch) -> (state, loss), and described arguments."""
    module, cfg = MODELS[name]
    mesh = fs.make_mesh(kind=kind, **{"model" if way.model else "seq" if way.context else "data": 2})
    data, model = "data" if way.data else None, "model" if way.model else None
    layout = module.Layout(data, model, **way.layout)
    described, specs = module.init(cfg), module.specs(cfg, model=model, **({"experts": "data"} if way.experts else {}))
    if way.sharded:
        specs = fs.fully_shard(specs, described, axis="data")
    if way.offload:
        specs = fs.on_host(specs)
    state: dict[str, Any] = {"params": described}
    rows, images = ROWS * (2 if way.data else 1), name == "resnet"
    if images:
        state["stats"] = resnet.state(cfg)
        batch = (fs.init.normal((rows, 3, 64, 64)), fs.init.zeros((rows,), dtype=torch.int64))
        opt = fs.optim.sgd(0.1, momentum=0.9, weight_decay=1e-4)
    else:
        batch = (fs.init.zeros((rows, T), dtype=torch.int64), fs.init.zeros((rows, T), dtype=torch.int64))
        opt = fs.optim.adamw(1e-3)
    state["opt"] = opt.init(described)
    placed = {"params": specs, "opt": opt.specs(specs), **({"stats": P()} if images else {})}

    tokens = P(None, "seq") if way.context else P(data)

    @fs.shard_map(mesh=mesh, in_specs=(placed, tokens, tokens), out_specs=(placed, P()), donate=0)
    def step(state: Any, x: Tensor, y: Tensor) -> Any:
        def loss_fn(params: Any, x: Tensor, y: Tensor) -> Any:
            more = {"layout": layout, "specs": specs, "remat": way.remat}
            if images:
                return resnet.loss(cfg, params, state["stats"], x, y, **more)
            return module.loss(cfg, params, x, y, **more), {}

        f = (
            fs.accumulate(loss_fn, way.steps, has_aux=True)
            if way.steps > 1
            else fs.value_and_grad(loss_fn, has_aux=True)
        )
        (loss, stats), grads = f(state["params"], x, y)
        if way.steps > 1:
            stats = fs.tree.map(lambda x: x[-1], stats)
        params, new = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": new, **({"stats": stats} if images else {})}, loss

    return step, ({**state}, *batch), placed, tokens


def measured(name: str, which: str) -> dict[str, Any]:
    """On a rank: the peak and the transfers of a real step, and those of its plan."""
    if name == "kinds":
        step, described, placed, batch_spec = plan_kinds.build(which, "process")
    elif name == "defer":
        step, described, placed, batch_spec = build_module(which, "process")
    elif name == "pipeline":
        step, described, placed, batch_spec = build_pipeline(which, "process")
    else:
        step, described, placed, batch_spec = build(name, WAYS[which], "process")
    rank = step.mesh.ranks[0]
    plan = max(plan_ranks(step, described, None), key=lambda p: (p.rank == rank, p.memory.peak))
    plan = plan.positions[rank] if plan.positions else plan
    mesh, found = step.mesh, {}

    def setup() -> Callable[[], object]:
        if below_torch.is_counting():
            below_torch.begin()
        state = fs.materialize(described[0], placed, mesh, key=fs.key(0))
        batch = fs.materialize(described[1:], batch_spec, mesh, key=fs.key(1))
        found["arguments"] = sum(x.shards[0].nbytes for x in fs.tree.leaves((state, batch)))

        def run() -> object:
            nonlocal state
            state, loss = step(state, *batch)
            return loss

        run()  # checked
        run()  # the first with buffers
        with fs.recording() as log:
            run()
        found["transfers"] = list(log)
        if below_torch.is_counting():
            gc.collect()
            found["live"] = below_torch.reset_peak()
            run()
            found["added"] = below_torch.peak() - found["live"]
        return run

    cost = measure_step(setup, warmup=1)
    both = found["transfers"], plan.transfers
    if name == "defer":  # a step of the library is at the line that calls it
        both = tuple([replace(t, where=None) for t in some] for some in both)
    same = list(both[0]) == list(both[1])
    kernels = {"below": cost.start + found["added"], "kept": found["live"] - cost.start} if "added" in found else {}
    return {"tensors": cost.peak, **kernels, "start": cost.start, "arguments": found["arguments"],
            "planned": plan.memory.peak, "warnings": plan.warnings,
            "planned arguments": plan.memory.arguments, "parts": plan.memory.parts, "where": str(plan.memory.where),
            "transfers": len(found["transfers"]), "transfers are equal": same,
            "differ": [(str(a), str(b)) for a, b in zip(*both, strict=False) if a != b][:3]}  # fmt: skip


OTHERS = [
    *(f"gpt2/{way}" for way in ("ddp", "fsdp", "keep", "remat", "offload", "tp", "tp+sp", "accumulate", "context")),
    *("llama/fsdp", "llama/tp+sp", "llama/bf16", "t5/fsdp", "t5/tp", "mixtral/experts", "resnet/ddp", "resnet/fsdp"),
    *("pipeline/gpipe", "pipeline/1f1b", "pipeline/zero_bubble"), *(f"defer/{name}" for name in MODULES),
]  # fmt: skip


def outcome_of(rows: list[dict[str, Any]], case: str) -> dict[str, Any]:
    """Of the ranks of a step, the one with most bytes; of a pipeline, whose plans differ, the one with most error."""
    for row in rows:
        row["measured"] = row.get("below", row["tensors"])
        row["error"] = row["planned"] / row["measured"] - 1
        row["error of tensors"] = row["planned"] / row["tensors"] - 1
    worst = max(rows, key=lambda r: abs(r["error"]) if case.startswith("pipeline") else r["measured"])
    warned = any(text.startswith("workspace unknown") for text in worst["warnings"])
    equal = all(r["transfers are equal"] for r in rows)
    return {**worst, "warned": warned, "within": abs(worst["error"]) <= WITHIN, "transfers are equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = [f"{name}/{way}" for name in MODELS for way in WAYS if (name, way) not in SKIPPED]
    kinds = [f"kinds/{kind}" for kind in plan_kinds.KINDS]
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--every", action="store_true", help="every model in every layout")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    below_torch.preload()
    below = "" if below_torch.is_counting() else "; no C compiler: only torch's profiler"
    cases = args.only or [*(ways if args.every else OTHERS), *kinds]
    cases += [f"pipeline/{schedule}" for schedule in SCHEDULES] if args.every and not args.only else []
    plan_kinds.import_for([case.removeprefix("kinds/") for case in cases])
    print(f"torch {torch.__version__}, gloo, load {os.getloadavg()[0]:.1f}; MiB of the rank with most{below}")
    print(f"  {'':22}{'planned':>9}{'tensors':>9}{'below':>9}{'error':>9}{'tensors':>9}{'kept':>7}  transfers")
    figures = {}
    for case in cases:
        name, _, which = case.partition("/")
        row = outcome_of(run_on_ranks(4 if name == "pipeline" else 2, measured, name, which), case)
        figures[case] = row
        print(
            f"  {case:22}{row['planned'] / MIB:9.2f}{row['tensors'] / MIB:9.2f}{row['measured'] / MIB:9.2f}"
            f"{row['error']:9.2%}{row['error of tensors']:9.2%}{row.get('kept', 0) / MIB:7.2f}  {row['transfers']:4d}"
            f" {'equal' if row['transfers are equal'] else 'DIFFER'}{' warned' if row['warned'] else ''}"
            f"{'' if row['within'] or row['warned'] else ' MISS'}",
            flush=True,
        )
        if not row["transfers are equal"]:
            print(row["differ"])
    held = sum((row["within"] or row["warned"]) and row["transfers are equal"] for row in figures.values())
    within = sum(row["within"] for row in figures.values())
    print(f"  {held} of {len(figures)} rows hold; {within} are within {WITHIN:.0%}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

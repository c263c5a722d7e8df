"""`fs.plan` against real ranks: `python -m tests.benchmarks.plan_accuracy [--only gpt2/ddp ...] [--json FILE]`.

Train steps of GPT-2, Llama, T5 and a ResNet, each under data parallel, FSDP in several schedules, tensor and sequence
parallel, accumulation and bfloat16, on two processes over gloo; and a pipeline in each schedule, on four. The peak of
the bytes in tensors is read from torch's profiler (`step_cost`), below fshard, and the transfers from `fs.recording`.
The plan is made in the same process, from the same function. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn
from fshard.models import gpt2, llama, mixtral, resnet, t5

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
    built = build_pipeline(which, "process") if name == "pipeline" else build(name, WAYS[which], "process")
    step, described, placed, batch_spec = built
    plan = fs.plan(step, *described)
    plan = plan.positions[step.mesh.ranks[0]] if plan.positions else plan
    mesh, found = step.mesh, {}

    def setup() -> Callable[[], object]:
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
        return run

    cost = measure_step(setup, warmup=1)
    both = found["transfers"], plan.transfers
    same = tuple(both[0]) == both[1]
    return {"peak": cost.peak, "start": cost.start, "arguments": found["arguments"], "planned": plan.memory.peak,
            "planned arguments": plan.memory.arguments, "parts": plan.memory.parts, "where": str(plan.memory.where),
            "transfers": len(found["transfers"]), "transfers are equal": same,
            "differ": [(str(a), str(b)) for a, b in zip(*both, strict=False) if a != b][:3]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    every = [f"{name}/{way}" for name in MODELS for way in WAYS if (name, way) not in SKIPPED]
    every += [f"pipeline/{schedule}" for schedule in SCHEDULES]
    parser.add_argument("--only", nargs="+", default=every)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, gloo, load {os.getloadavg()[0]:.1f}; MiB of the rank with most")
    print(f"  {'':20}{'measured':>10}{'planned':>10}{'error':>9}   of that above the arguments, transfers")
    figures = {}
    for case in args.only:
        name, _, which = case.partition("/")
        rows = run_on_ranks(4 if name == "pipeline" else 2, measured, name, which)
        for row in rows:
            row["error"] = row["planned"] / row["peak"] - 1
        # Ranks of a pipeline have different plans: the worst one counts.
        row = max(rows, key=lambda r: abs(r["error"]) if name == "pipeline" else r["peak"])
        figures[case] = row
        above = (row["planned"] - row["arguments"]) / (row["peak"] - row["arguments"]) - 1
        alike = "equal" if all(r["transfers are equal"] for r in rows) else "DIFFER"
        print(
            f"  {case:20}{row['peak'] / MIB:10.2f}{row['planned'] / MIB:10.2f}{row['error']:9.2%}"
            f"{'' if abs(row['error']) <= WITHIN else ' MISS'}  {above:8.2%}  {row['transfers']:4d} {alike}"
            f"  (start {(row['start'] - row['arguments']) / MIB:.2f} above)",
            flush=True,
        )
        if alike != "equal":
            print(row["differ"])
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

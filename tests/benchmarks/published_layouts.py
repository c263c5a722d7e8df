"""The order of published layouts beside the order that plans give: `python -m tests.benchmarks.published_layouts`.

Hugging Face's Ultra-Scale Playbook measured thousands of layouts of four Llama models on 8 to 512 H100, each with a
global batch of 256 sequences of 4,096 tokens and no recomputation. `published_layouts.csv` has those without pipeline
parallelism: tokens per second and device, by data and tensor parallelism, microbatch and ZeRO stage. The same steps are
planned with `fshard.models.llama`, at one fitted number: the efficiency of the H100, from the fastest 8.86B on 8.

Each order is planned twice: with the links of the data sheet, and with those that the same cluster had when the program
itself summed 1 GiB over all ranks of a job (the median of all its runs): over 64 nodes at 33 GB/s, where the data sheet
has 400.

Source: huggingface.co/spaces/nanotron/ultrascale-playbook, `assets/data/benchmarks/benchmarks_interactive.html`, rows
of "PP: 1", and `pp_comm_bandwidth.html` there; huggingface/nanotron, `scripts/scaling_benchmarks.py` for the sizes of
the models, and `measure_bandwidth` in `src/nanotron/trainer.py` at e3b886c for what was measured.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard import P, devices, optim
from fshard.models import llama
from fshard.planning import Plan, roofline
from fshard.planning.devices import Device

EXAMPLES, TIME, VOCAB = 256, 4096, 131_072
SIZES = {  # layers, width, hidden units, heads; the smaller two tie their head to the table
    "1.34B": (16, 2048, 8192, 32),
    "3.57B": (28, 3072, 8192, 32),
    "8.86B": (32, 4096, 14336, 32),
    "80B": (80, 8192, 28672, 64),
}
FIT = ("8.86B", 8)  # its fastest row fits the efficiency
SUMS = {16: 361.7e9, 32: 160.1e9, 64: 99.6e9, 128: 84.7e9, 256: 64.9e9, 512: 32.9e9}  # bytes/s of all_reduce, by ranks
_BLOCKS = 2  # planned, and one more: the others add as much


@dataclass(frozen=True)
class Layout:
    """A published layout: examples of a microbatch on each data rank, and ZeRO 0 (DDP) or 1."""

    model: str
    data: int
    tensor: int
    micro_batch: int
    zero: int

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    @property
    def microbatches(self) -> int:
        return EXAMPLES // (self.data * self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of a step on each device."""
        return EXAMPLES * TIME // self.ranks

    def config(self, blocks: int) -> llama.Config:
        _, width, hidden, heads = SIZES[self.model]
        return llama.Config(
            vocab_size=VOCAB, hidden_size=width, intermediate_size=hidden, num_hidden_layers=blocks,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=TIME,
            tie_word_embeddings=hidden < 10_000,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"DP {self.data}, TP {self.tensor}, {self.micro_batch} x {self.microbatches}, ZeRO-{self.zero}"


@dataclass(frozen=True)
class Row:
    layout: Layout
    measured: float  # tokens per second and device


def published() -> list[Row]:
    with Path(__file__).with_suffix(".csv").open() as f:
        return [
            Row(Layout(model, *map(int, numbers)), float(tokens)) for model, *numbers, tokens in list(csv.reader(f))[1:]
        ]


def step_of(layout: Layout, blocks: int, microbatches: int, *, overlapped: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """The step with AdamW in float32, computed in bfloat16, whose gradients cross the data axis once.

    ZeRO-1 sums them in its update. DDP sums them after the microbatches; or, `overlapped`, those of each block of one
    microbatch while the block before computes its own.
    """
    cfg = layout.config(blocks)
    mesh = fs.make_mesh(kind="abstract", data=layout.data, model=layout.tensor)
    described, specs = llama.init(cfg), llama.specs(cfg, model="model")
    options = llama.Layout("data", "model", sequence=layout.tensor > 1, dtype=torch.bfloat16,
                           reduce_dtype=torch.float32, varied=not overlapped)  # fmt: skip
    opt, zero = optim.adamw(1e-4), layout.zero and layout.data > 1
    if zero:
        opt = optim.zero(opt, specs, fs.fully_shard(specs, described, axis="data"), axis="data")
    placed = {"params": specs, "opt": opt.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P("data"), P("data")), out_specs=(placed, P()), donate=0)
    def step(state: Any, ids: Tensor, targets: Tensor) -> Any:
        loss = lambda p, x, y: llama.loss(cfg, p, x, y, layout=options, specs=specs)  # noqa: E731
        own = lambda p: fs.pvary(p, "data")  # noqa: E731
        params = state["params"]
        if overlapped:
            value, grads = fs.value_and_grad(loss)(params, ids, targets)
        elif zero:
            value, grads = fs.accumulate(loss, microbatches)(own(params), ids, targets)
        else:
            value, grads = fs.accumulate(loss, microbatches, gather=own)(params, ids, targets)
        params, new = opt.update(grads, state["opt"], params)
        return {"params": params, "opt": new}, value

    ids = fs.init.zeros((layout.data * layout.micro_batch * microbatches, TIME), dtype=torch.int64)
    return step, ({"params": described, "opt": opt.init(described)}, ids, ids)


class Plans(NamedTuple):
    """Plans of two numbers of blocks each, from which those of all blocks follow."""

    last: Sequence[Plan]  # a step of one microbatch
    one: Sequence[Plan] = ()  # the same without overlap, and with a microbatch more: what a microbatch adds
    two: Sequence[Plan] = ()


def plans_of(layout: Layout) -> Plans:
    def plans(microbatches: int, **options: Any) -> list[Plan]:
        steps = [step_of(layout, _BLOCKS + i, microbatches, **options) for i in (0, 1)]
        return [fs.plan(step, *args, device=devices.H100) for step, args in steps]

    last = plans(1, overlapped=not layout.zero)
    return Plans(last) if layout.microbatches == 1 else Plans(last, plans(1) if not layout.zero else last, plans(2))


def predict(layout: Layout, plans: Plans, device: Device) -> float:
    """Tokens per second and device."""

    def seconds(of: Sequence[Plan]) -> float:
        few, more = (roofline(plan.events, plan.mesh, device).seconds for plan in of)
        return few + (more - few) * (SIZES[layout.model][0] - _BLOCKS)

    added = seconds(plans.two) - seconds(plans.one) if plans.two else 0.0
    return layout.tokens / (seconds(plans.last) + added * (layout.microbatches - 1))


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's: 1 for the same order, -1 for the opposite one. Equal numbers have their mean rank."""
    ranks = [torch.tensor([(sum(y < x for y in of) + sum(y <= x for y in of) - 1) / 2 for x in of]) for of in (xs, ys)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL", choices=SIZES, default=list(SIZES))
    parser.add_argument("--devices", nargs="+", type=int, help="such numbers of devices alone")
    parser.add_argument("--rows", action="store_true", help="print every layout")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = published()
    fit = max((r for r in rows if (r.layout.model, r.layout.ranks) == FIT), key=lambda r: r.measured)
    plans = plans_of(fit.layout)
    at = lambda efficiency: dataclasses.replace(devices.fitted(devices.H100), efficiency=efficiency)  # noqa: E731
    efficiency = devices.efficiency_at(lambda x: 1 / predict(fit.layout, plans, at(x)), 1 / fit.measured)
    print(f"efficiency {efficiency:.3f}, from {fit.layout.model}, {fit.layout}: {fit.measured:,.0f} tokens/s")
    print("Links of the data sheet, then measured ones: correlation; what the first planned measured; its layout")
    sheet = at(efficiency)
    found = []
    key = lambda r: (SIZES[r.layout.model], r.layout.ranks)  # noqa: E731
    chosen = [r for r in rows if r.layout.model in args.only and r.layout.ranks in (args.devices or [r.layout.ranks])]
    for _, group in itertools.groupby(sorted(chosen, key=key), key):
        own = list(group)
        of_each = [plans_of(r.layout) for r in own]
        measured = [r.measured for r in own]
        planned = [[predict(r.layout, p, device) for r, p in zip(own, of_each, strict=True)]
                   for device in (sheet, devices.with_bus_bandwidth(sheet, SUMS))]  # fmt: skip
        print(
            f"{own[0].layout.model}, {own[0].layout.ranks} devices, {len(own)} layouts, {max(measured):,.0f} tokens/s"
        )
        for speeds in planned:
            first = own[max(range(len(own)), key=lambda i: speeds[i])]
            share = first.measured / max(measured)
            correlation = rank_correlation(speeds, measured)
            print(f"    {correlation:5.2f} {first.measured:8,.0f} ({share:4.0%})  {first.layout}", flush=True)
        for r, *speeds in sorted(zip(own, *planned, strict=True), key=lambda x: -x[0].measured) if args.rows else ():
            print(f"    {r.layout!s:36} {r.measured:8,.0f} measured; planned" + "".join(f"{s:8,.0f}" for s in speeds))
        found += [{**dataclasses.asdict(r.layout), "measured": r.measured, "planned": speeds}
                  for r, *speeds in zip(own, *planned, strict=True)]  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Pipelines compared with torch's: `python -m tests.benchmarks.pipeline [--tokens 2048] [--only 1f1b ...]`.

Loss and gradients of 8 feed-forward blocks over two processes of one thread each, in 8 microbatches. Between the
ranks pass the same messages. torch has no zero-bubble schedule of one stage for each rank: its interleaved one is
compared with zero_bubble. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import fshard as fs
from fshard import P

from .context import Step, timed
from .init import MIB
from .peers import ratios, run_on_ranks
from .step_cost import measure_step

RANKS, LAYERS, MICROBATCHES, WIDTH, HIDDEN = 2, 8, 8, 256, 1024
LIMITS = {"seconds": 1.0, "CPU seconds": 1.0, "MiB of tensors": 1.0, "MiB sent": 1.0}
PEERS = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2),
         "zero_bubble": (ScheduleInterleavedZeroBubble, 2)}  # fmt: skip


def weights() -> dict[str, Tensor]:
    """Return the stacked weights of all layers."""
    g = torch.Generator().manual_seed(0)
    up, down = (torch.randn(LAYERS, *shape, generator=g) / shape[0] ** 0.5
                for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))  # fmt: skip
    return {"up": up, "down": down, "norm": torch.ones(LAYERS, WIDTH)}


def data(tokens: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, [tokens, D]."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(tokens, WIDTH, generator=g), torch.randn(tokens, WIDTH, generator=g)


def block(p: Any, h: Tensor) -> Tensor:
    """Add a feed-forward of the normalized h."""
    return h + F.gelu(F.layer_norm(h, (WIDTH,), p["norm"]) @ p["up"]) @ p["down"]


class Blocks(torch.nn.Module):
    """Some layers in order."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        rows = [{name: torch.nn.Parameter(x[i].clone()) for name, x in weights().items()} for i in layers]
        self.layers = torch.nn.ModuleList(map(torch.nn.ParameterDict, rows))

    def forward(self, h: Tensor) -> Tensor:
        for p in self.layers:
            h = block(p, h)
        return h


def torchs(tokens: int, *, kind: str) -> Step:
    """Return torch's step, which returns the gradients of up, down and norm of each layer."""
    schedule_class, v = PEERS[kind]
    rank, size, device = dist.get_rank(), LAYERS // (RANKS * v), torch.device("cpu")
    places = [c * RANKS + rank for c in range(v)]
    modules = [Blocks(range(place * size, (place + 1) * size)) for place in places]
    stages = [PipelineStage(m, place, RANKS * v, device) for m, place in zip(modules, places, strict=True)]
    schedule = schedule_class(stages[0] if v == 1 else stages, MICROBATCHES, loss_fn=F.mse_loss)  # type: ignore[arg-type,call-arg]
    x, target = data(tokens)

    def step() -> Any:
        schedule.step(*([x] if rank == 0 else []), target=target if rank == RANKS - 1 else None)
        grads = [p[name].grad for m in modules for p in m.layers for name in ("up", "down", "norm")]
        for module in modules:  # which would still have them at the next step
            module.zero_grad(set_to_none=True)
        return grads

    return in_order(step, [i for place in places for i in range(place * size, (place + 1) * size)])


def in_order(step: Callable[[], Sequence[Tensor]], layers: Sequence[int]) -> Step:
    """Return the step of a rank with these layers; its first call returns the gradients of all layers, in order."""
    calls = itertools.count()

    def run() -> tuple[Tensor, ...]:
        grads = step()
        if next(calls):
            return tuple(grads)
        ranks: list[Any] = [None] * RANKS
        dist.all_gather_object(ranks, {layer: grads[3 * i : 3 * i + 3] for i, layer in enumerate(layers)})
        rows = {layer: row for rank in ranks for layer, row in rank.items()}
        return tuple([x for layer in sorted(rows) for x in rows[layer]])

    return run


def fshards(tokens: int, *, kind: str) -> Step:
    """Return fshard's step, which returns the same gradients."""
    v = PEERS[kind][1] if kind == "interleaved" else 1
    mesh, spec = fs.make_mesh(kind="process", stage=RANKS), P(None, "stage") if v > 1 else P("stage")
    size = LAYERS // (RANKS * v)
    layers = {name: x.reshape(v, LAYERS // v, *x.shape[1:]) if v > 1 else x for name, x in weights().items()}
    placed = fs.device_put(layers, fs.tree.map(lambda _: spec, layers), mesh)
    batch = fs.device_put(data(tokens), P(), mesh)
    run = fs.pipelined(lambda ends, b: b[0], lambda p, h, b: block(p, h), lambda ends, h, b: F.mse_loss(h, b[1]),
                       axis="stage", microbatches=MICROBATCHES, schedule=kind, chunks=v)  # type: ignore[arg-type]  # fmt: skip

    @fs.shard_map(mesh=mesh, in_specs=(spec, P()), out_specs=(P(), spec))
    def call(layers: Any, batch: Any) -> Any:
        loss, (_, grads) = run(({}, layers), batch)
        return loss, grads

    def step() -> Any:
        _, grads = call(placed, batch)
        rows = {name: x.shards[0].flatten(0, 1) if v > 1 else x.shards[0] for name, x in grads.items()}
        return [rows[name][i] for i in range(size * v) for name in ("up", "down", "norm")]

    places = [c * RANKS + dist.get_rank() for c in range(v)]
    return in_order(step, [i for place in places for i in range(place * size, (place + 1) * size)])


def cost(way: Any, tokens: int) -> tuple[int, int]:
    """Return the most bytes of tensors during a step, weights and batch included, and the bytes that the rank sends."""
    step = measure_step(lambda: way(tokens))
    return step.peak, step.sent(RANKS)


def compare(ways: dict[str, Any], tokens: int, repeats: int) -> bool:
    """Print fshard's figures, torch's and the ratios; return whether one is above its limit."""
    rank, *_ = run_on_ranks(RANKS, timed, ways, tokens, repeats)
    costs = {name: run_on_ranks(RANKS, cost, way, tokens) for name, way in ways.items()}
    peaks = ", ".join(f"{name} {[round(peak / MIB, 1) for peak, _ in ranks]}" for name, ranks in costs.items())
    print(f"largest difference of gradients {rank['difference']:.1e}; peak of each rank, MiB: {peaks}")
    missed = False
    for what, limit in LIMITS.items():
        if "MiB" in what:
            ours, theirs = (max(row["sent" in what] for row in costs[name]) / MIB for name in ("fshard", "torch"))
            ratio = ours / theirs
        else:
            a, b = rank["fshard"][what], rank["torch"][what]
            ours, theirs, ratio = statistics.median(a), statistics.median(b), ratios(a, b)[0]
        missed |= ratio > limit
        print(f"{what:15} fshard {ours:8.3f}   torch {theirs:8.3f}   ratio {ratio:.3f}, asked {limit:.2f}", flush=True)
    return missed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pipeline", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {RANKS} processes, {LAYERS} layers of {WIDTH} x {HIDDEN}, "
          f"{args.tokens} tokens in {MICROBATCHES} microbatches", flush=True)  # fmt: skip
    missed = 0
    for kind in args.only:
        peer = PEERS[kind][0].__name__
        print(f"{kind} and {peer}", flush=True)
        ways = {"torch": functools.partial(torchs, kind=kind), "fshard": functools.partial(fshards, kind=kind)}
        missed |= compare(ways, args.tokens, args.repeats)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())

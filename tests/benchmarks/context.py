"""Ring attention beside torch's: `python -m tests.benchmarks.context [--positions 4096] [--repeats 7]`.

Causal attention, forward and backward, of one sequence in zigzag order over two processes of one thread each. torch's
ring has no kernel on a CPU: it is given the one that fshard uses. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.torch import flash_attention, flash_attention_backward

from .init import MIB
from .peers import ratios, run_on_ranks
from .step_cost import measure_step

RANKS, HEADS, WIDTH = 2, 8, 64
LIMITS = {"seconds": 1.0, "CPU seconds": 1.0, "MiB of tensors": 0.9}
Step = Callable[[], tuple[Tensor, ...]]
Way = Callable[[int], Step]


def parts(positions: int) -> list[Tensor]:
    """Return this rank's q, k, v and the gradient of the result: [1, H, T/n, K] in zigzag order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    out = []
    for i in range(4):
        chunks = torch.randn(1, HEADS, positions, WIDTH, generator=torch.Generator().manual_seed(i)).chunk(2 * n, 2)
        out.append(torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], 2))
    return out


def torchs(positions: int) -> Step:
    q, k, v, g = parts(positions)

    def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **_: Any) -> Any:
        return flash_attention(q, k, v, 0.0, is_causal)

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                 is_causal: bool, **_: Any) -> Any:  # fmt: skip
        return flash_attention_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    def step() -> tuple[Tensor, ...]:
        ring, group = context_parallel, dist.group.WORLD
        out, lse, *_ = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        grads = ring._templated_ring_attention_backward(group, 2, backward, g, "grad_out", q, k, v, out, lse, True)
        return out, *grads[:3]

    return step


def fshards(positions: int) -> Step:
    mesh, spec = fs.make_mesh(kind="process", seq=RANKS), P(None, None, "seq")
    shape = (1, HEADS, positions, WIDTH)
    placed = [fs.from_callback(shape, spec, mesh, lambda _, x=x: x) for x in parts(positions)]

    @fs.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = fs.nn.context_attention(*leaves, "seq")
        return out.detach(), *torch.autograd.grad(out, leaves, g)

    return lambda: tuple([x.shards[0] for x in call(*placed)])


# --- the report -----------------------------------------------------------------------------------------------


def timed(ways: dict[str, Way], size: int, repeats: int) -> dict[str, Any]:
    """Return seconds of both, called in turn, and the largest difference of their results."""
    steps = {name: way(size) for name, way in ways.items()}
    first = {name: step() for name, step in steps.items()}
    found: dict[str, Any] = {name: {"seconds": [], "CPU seconds": []} for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            found[name]["CPU seconds"].append(time.process_time() - cpu)
            dist.barrier()
            found[name]["seconds"].append(time.perf_counter() - wall)
    pairs = zip(first["fshard"], first["torch"], strict=True)
    return found | {"difference": max(float((a - b).abs().max()) for a, b in pairs)}


def live(way: Way, size: int) -> int:
    """Return the most bytes of tensors during a step, above those before it."""
    cost = measure_step(lambda: way(size))
    return cost.peak - cost.start


def compare(ways: dict[str, Way], size: int, repeats: int, limits: dict[str, float]) -> int:
    """Print fshard's figures, torch's and the ratios; return 1 if one is above its limit."""
    rank, *_ = run_on_ranks(RANKS, timed, ways, size, repeats)
    print(f"largest difference of results and gradients {rank['difference']:.1e}")
    missed = False
    for what, limit in limits.items():
        if what == "MiB of tensors":
            ours, theirs = (max(run_on_ranks(RANKS, live, ways[name], size)) / MIB for name in ("fshard", "torch"))
            ratio = ours / theirs
        else:
            a, b = rank["fshard"][what], rank["torch"][what]
            ours, theirs, ratio = statistics.median(a), statistics.median(b), ratios(a, b)[0]
        missed |= ratio > limit
        print(f"{what:15} fshard {ours:8.3f}   torch {theirs:8.3f}   ratio {ratio:.2f}, asked {limit:.2f}")
    return int(missed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.context", description=__doc__)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {RANKS} processes, T={args.positions}, {HEADS} heads of {WIDTH}", flush=True)
    return compare({"torch": torchs, "fshard": fshards}, args.positions, args.repeats, LIMITS)


if __name__ == "__main__":
    raise SystemExit(main())

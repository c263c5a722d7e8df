"""A dropless mixture beside torch's collectives: `python -m tests.benchmarks.experts [--tokens 4096] [--repeats 7]`.

Forward and backward of a mixture of eight experts over two processes of one thread each, with skewed routing. torch's
way has the steps of torchtitan's dispatch: counts by `all_to_all_single`, rows by its form with a gradient, an index
that sorts them by expert, and a sum by `scatter_add`. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

import fshard as fs
from fshard import P

from .context import RANKS, Step, compare

EXPERTS, CHOSEN, WIDTH, HIDDEN = 8, 2, 256, 512
LIMITS = {"seconds": 1.0, "CPU seconds": 1.0, "MiB of tensors": 0.87}


def tensors(tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's x, logits and gradient of the result, each [N/n, ..], and its matrices [E/n, ..]."""
    rank, n, g = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0)
    x, logits, grad = (torch.randn(tokens, d, generator=g) for d in (WIDTH, EXPERTS, WIDTH))
    logits += torch.linspace(2, 0, EXPERTS)  # the first experts are chosen most
    up, down = (torch.randn(EXPERTS, *shape, generator=g) / 16 for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    return [y.chunk(n)[rank].clone() for y in (x, logits, grad)], [y.chunk(n)[rank].clone() for y in (up, down)]


def mlp(rows: Tensor, up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
    out = [torch.relu(part @ a) @ b for part, a, b in zip(rows.split(counts), up, down, strict=True)]
    return torch.cat(out)


def torchs(tokens: int) -> Step:
    (x, logits, grad), matrices = tensors(tokens)
    n, group = dist.get_world_size(), dist.group.WORLD

    def step() -> tuple[Tensor, ...]:
        h, *weights = leaves = [y.detach().requires_grad_() for y in (x, *matrices)]
        scores, experts = logits.softmax(-1).topk(CHOSEN)
        scores = scores / scores.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        token = order // CHOSEN
        counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sent, got = (y.view(n, -1).sum(1).tolist() for y in (counts, received))
        rows = all_to_all_single_autograd(h[token], got, sent, group)
        by_rank = received.view(n, -1)  # of rank and expert
        arrived = torch.arange(by_rank.shape[1]).repeat(n).repeat_interleave(received)
        by_expert = arrived.argsort(stable=True)
        y = mlp(rows[by_expert], *weights, by_rank.sum(0).tolist())
        back = torch.empty_like(y).index_put((by_expert,), y)
        y = all_to_all_single_autograd(back, sent, got, group) * scores.flatten()[order, None]
        out = torch.zeros_like(h).scatter_add(0, token[:, None].expand_as(y), y)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return step


def fshards(tokens: int) -> Step:
    mesh, spec = fs.make_mesh(kind="process", expert=RANKS), P("expert")
    values, matrices = tensors(tokens)
    placed = [fs.from_callback((len(y) * RANKS, *y.shape[1:]), spec, mesh, lambda _, y=y: y)
              for y in (*values, *matrices)]  # fmt: skip

    def run(p: tuple[Tensor, Tensor], rows: Tensor, counts: list[int]) -> Tensor:
        return mlp(rows, *p, counts)

    @fs.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def call(x: Tensor, logits: Tensor, grad: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        x, *weights = leaves = [y.detach().requires_grad_() for y in (x, up, down)]
        out = fs.nn.mixture(x, fs.nn.route(logits, CHOSEN), tuple(weights), run, axis="expert")
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return lambda: tuple([y.shards[0] for y in call(*placed)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.experts", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of both ranks")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    print(
        f"torch {torch.__version__}, {RANKS} processes, {args.tokens} tokens, {CHOSEN} of {EXPERTS} experts", flush=True
    )
    return compare({"torch": torchs, "fshard": fshards}, args.tokens, args.repeats, LIMITS)


if __name__ == "__main__":
    raise SystemExit(main())

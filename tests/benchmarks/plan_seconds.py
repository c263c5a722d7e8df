"""Seconds of plans after `devices.measure`: `python -m tests.benchmarks.plan_seconds [--only NAME ...] [--repeats 3]`.

Train steps of common models on one rank and one thread of a CPU, none of them among the reference steps of
`fshard/planning/reference.py`. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P

from . import plan_accuracy, plan_kinds

WITHIN = 0.15
KINDS = ("lstm", "unet", "vit", "convnext")  # of `plan_kinds`
PROGRAMS = ("mlp", "gpt2", "llama", "t5", "resnet", *KINDS)
LEAST, SECONDS = 7, 0.5  # runs of a step, and of all of them


def build_mlp() -> tuple[Any, ...]:
    """As `plan_accuracy.build`: four layers of 64 units."""

    @fs.shard_map(mesh=fs.make_mesh(kind="abstract", data=1), in_specs=(P(), P()), out_specs=(P(), P()))
    def step(weights: list[Tensor], x: Tensor) -> Any:
        def loss_fn(weights: list[Tensor]) -> Tensor:
            h = x
            for w in weights:
                h = torch.relu(h @ w)
            return h.square().mean()

        loss, grads = fs.value_and_grad(loss_fn)(weights)
        return fs.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    weights = [fs.init.normal((64, 64), std=0.1) for _ in range(4)]
    return step, (weights, fs.init.normal((64, 64))), P(), P()


def build(name: str) -> tuple[Any, ...]:
    if name == "mlp":
        return build_mlp()
    if name in KINDS:
        return plan_kinds.build(name, "abstract")
    return plan_accuracy.build(name, plan_accuracy.Way(), "abstract")


def ready(name: str) -> tuple[Any, tuple[Any, ...], Callable[[], None]]:
    """Return a step on one rank, its described arguments, and a function that runs the next step."""
    step, described, placed, batch_spec = build(name)
    mesh = fs.make_mesh(kind="simulated", data=1)
    step = step.on(mesh)
    state = fs.materialize(described[0], placed, mesh, key=fs.key(0))
    batch = fs.materialize(described[1:], batch_spec, mesh, key=fs.key(1))

    def run() -> None:
        nonlocal state
        state = step(state, *batch)[0]

    return step, described, run


def seconds_of(run: Callable[[], None]) -> float:
    """Return the median of the thread's CPU seconds, after a checked run and one that fills buffers."""
    run()
    run()
    times: list[float] = []
    while len(times) < LEAST or sum(times) < SECONDS:
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of devices.measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan_kinds.import_for([name for name in args.only if name in KINDS])
    errors: dict[str, list[float]] = {name: [] for name in args.only}
    for _ in range(args.repeats):
        device = fs.devices.measure(seconds=args.seconds)
        print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; milliseconds")
        for name in args.only:
            step, described, run = ready(name)
            measured = seconds_of(run)
            planned = fs.plan(step, *described, device=device).time.seconds
            errors[name].append(planned / measured - 1)
            print(f"  {name:10}{1e3 * measured:9.2f}{1e3 * planned:9.2f}{errors[name][-1]:+8.1%}", flush=True)
    for name, found in errors.items():
        miss = "" if max(map(abs, found)) <= WITHIN else "  MISS"
        print(f"  {name:10}" + "".join(f"{error:+8.1%}" for error in found) + miss)


if __name__ == "__main__":
    main()

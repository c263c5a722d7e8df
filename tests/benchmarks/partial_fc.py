"""Sampled classes beside the full head: `python -m tests.benchmarks.partial_fc [--classes 100k] [--share 0.1]`.

ArcFace on a table of classes, and a step of SGD with momentum: of all classes, of all of them in chunks inside the
backward pass, and of a sample of them (Partial FC).
Memory of a rank and seconds of a step, each in turn in new processes. README.md in this folder says how to read them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fshard as fs
from fshard import P

from .classes import BATCH, LR, MOMENTUM, WIDTH, Report, available, batches, body, measure, show, table
from .init import MIB
from .peers import ratios
from .predict_classes import CLASSES
from .train_steps import Step

WAYS = ("full", "chunked", "sampled")


def arcface(classes: int, *, share: float, in_backward: bool = False) -> Step:
    mesh = fs.make_mesh(kind="process", model=dist.get_world_size())
    specs = {"body": P(), "head": {"w": P("model")}}
    opt = fs.optim.sgd(LR, momentum=MOMENTUM)
    states = {name: opt.specs(spec) for name, spec in specs.items()}
    count = round(share * classes)

    def loss_fn(params: Any, x: Tensor, targets: Tensor, sampled: Tensor | None) -> Tensor:
        features = fs.pvary(x @ params["body"], "model")
        cosines = fs.nn.cosine_logits(features, params["head"]["w"])
        logits = fs.nn.arcface(cosines, targets, axis="model", size=classes, classes=sampled)
        del cosines
        return fs.nn.cross_entropy(logits, targets, axis="model", size=classes, classes=sampled, donate=True)

    @fs.shard_map(mesh=mesh, in_specs=(specs, states, P(), P(), P()), out_specs=(specs, states, P()), donate=(0, 1))
    def train(params: Any, states: Any, x: Tensor, targets: Tensor, key: Tensor) -> Any:
        head, sampled = params["head"], None
        if in_backward:
            moments = {"count": states["body"]["count"], "m": {name: states[name]["m"] for name in params}}
            update = fs.value_and_update(loss_fn, opt, in_backward="head.w")
            loss, params, new = update(params, moments, x, targets, sampled)
            return params, {name: {"count": new["count"], "m": new["m"][name]} for name in params}, loss
        if count < classes:
            sampled = fs.nn.sample_classes(key, targets, size=classes, count=count, axis="model")
            rows = sampled - fs.local_range(len(head["w"]), "model", size=classes)[0]
            head = {"w": head["w"][rows]}
        loss, grads = fs.value_and_grad(loss_fn)(params | {"head": head}, x, targets, sampled)
        del head
        new_body, body_state = opt.update(grads["body"], states["body"], params["body"])
        if sampled is None:
            new_head, head_state = opt.update(grads["head"], states["head"], params["head"])
        else:
            new_head, head_state = fs.optim.update_rows(opt, rows, grads["head"], states["head"], params["head"])
        return {"body": new_body, "head": new_head}, {"body": body_state, "head": head_state}, loss

    params = {"body": fs.device_put(body(), P(), mesh), "head": {"w": table(classes, mesh)}}
    state = {name: opt.init(tree) for name, tree in params.items()}
    data = [fs.device_put(b, P(), mesh) for b in batches(classes)]

    def step(i: int) -> Tensor:
        nonlocal params, state
        params, state, loss = train(params, state, *data[i % len(data)], fs.fold_in(fs.key(0), i))
        return loss.shards[0]

    return step


def minimum(which: str, classes: int, ranks: int, share: float) -> int:
    """Bytes of a rank: its parts of weight and momentum, of the sampled weights, of gradients, and of logits."""
    own = classes / ranks
    used = share * own if which == "sampled" else own
    rows = {"full": used, "chunked": 0, "sampled": 2 * used}[which]
    return int(4 * (2 * own * WIDTH + rows * WIDTH + used * BATCH))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.partial_fc", description=__doc__)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=["100k"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--which", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--measure", nargs="+", choices=("time", "live"), default=["time", "live"])
    parser.add_argument("--rounds", type=int, default=3, help="new processes for each way, in turn")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each process")
    parser.add_argument("--memory", type=float, default=0.9 * available() / 1e9, help="GB that may be used")
    args = parser.parse_args(argv)
    ways = {"full": functools.partial(arcface, share=1.0),
            "chunked": functools.partial(arcface, share=1.0, in_backward=True),
            "sampled": functools.partial(arcface, share=args.share)}  # fmt: skip
    print(f"torch {torch.__version__}, batch {BATCH}, {WIDTH} features, float32, SGD with momentum, "
          f"{args.ranks} ranks of 1 thread, {args.share:.0%} of classes, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    gc.freeze()
    for name in args.classes:
        classes = CLASSES[name]
        rows: Report = {}
        for which in args.which:
            least = minimum(which, classes, args.ranks, args.share)
            total = args.ranks * least / 1e9
            arithmetic = f"{args.ranks} ranks x {least / MIB:,.0f} MiB = {total:.1f} GB"
            rows[which] = {"minimum": least} | ({} if total < args.memory else {"skipped": arithmetic})
        print(f"\n{name} classes")
        measure(rows, ways, classes, args.ranks, rounds=args.rounds, steps=args.steps, measures=args.measure)
        show(rows)
        sampled = rows.pop("sampled", {})
        for which, row in rows.items():
            if "seconds" in row and "seconds" in sampled:
                print(f"  sampled / {which}: time {ratios(sampled['seconds'], row['seconds'])[0]:.3f}", flush=True)
            if "live" in row and "live" in sampled:
                print(f"  sampled / {which}: live {sampled['live'] / row['live']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

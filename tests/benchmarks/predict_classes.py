"""Memory of a ResNet-50 with many classes, from shapes alone: `python -m tests.benchmarks.predict_classes`.

`fs.plan` of a train step: forward, backward and SGD with momentum. Nothing is computed. `tests/e2e/test_benchmarks.py`
asserts that the prediction is what a real step of a small ResNet allocates. README.md in this folder says how to read
the report.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn, optim
from fshard.models import resnet

from .init import MIB
from .step_cost import measure_step

CLASSES = {"1k": 1_000, "50k": 50_000, "100k": 100_000, "500k": 500_000, "1M": 1_000_000, "2M": 2_000_000}
HEADS = ("replicated", "row", "column", "row half", "column half", "row zero", "column zero", "column chunked")
LIMIT = 12_196  # MiB of the GPUs of the published figures
# MiB for each GPU as published: TorchShard 0.1.0, ResNet-50, 224 px, global batch 256, on 8 GPUs (2M: on 16).
PUBLISHED = {
    "1k": (4167, 4141, 4141, 2895, 2893, 4231, 4189), "50k": (5913, 4277, 4225, 3175, 2957, 4159, 4167),
    "100k": (8129, 4669, 4569, 3559, 3473, 4507, 4527), "500k": (None, 7365, 7917, 6567, 5919, 7071, 7071),
    "1M": (None, 10851, 11167, 10581, 9075, 9811, 10003), "2M": (None, None, 11615, None, None, None, None),
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Bytes of one rank: the arguments of a step, the most at one time, and those of it that are activations."""

    arguments: int
    peak: int
    activations: int


@dataclass
class Run:
    """A train step of a ResNet whose head is split over `data` in one of the ways of `HEADS`, and its description."""

    cfg: resnet.Config
    head: str
    mesh: fs.Mesh
    batch: int  # of all ranks

    def __post_init__(self) -> None:
        self.kind, _, option = self.head.partition(" ")
        half = torch.float16 if option == "half" else None
        model = "data" if self.kind == "column" else None
        self.layout = resnet.Layout("data", model, dtype=half, reduce_dtype=half and torch.float32,
                                    examples=self.batch)  # fmt: skip
        described = resnet.init(self.cfg)
        self.specs = resnet.specs(self.cfg, model=model)
        if self.kind == "row":
            self.specs = {**self.specs, "fc": {"w": P(None, "data"), "b": P()}}
        self.opt = optim.sgd(0.1, momentum=0.9, weight_decay=1e-4)
        self.zero, self.chunked = option == "zero", option == "chunked"
        if self.zero:
            split = fs.fully_shard(self.specs, described, axis="data")
            self.opt = optim.zero(self.opt, self.specs, split, axis="data", summed=True)
        self.trees = {"params": described, "opt": self.opt.init(described), "state": resnet.state(self.cfg)}
        self.tree_specs = {"params": self.specs, "opt": self.opt.specs(self.specs), "state": P()}

    def loss(self, params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        cfg, layout = self.cfg, self.layout
        if self.kind != "row":
            return resnet.loss(cfg, params, state, x, y, layout=layout)
        h, state = resnet.features(cfg, params, state, x, train=True, layout=layout)
        h = fs.all_gather(h, "data", size=self.batch)
        y = fs.all_gather(y, "data", size=self.batch, to="invariant")
        w, b = fs.cast(params["fc"], h.dtype).values()
        part = h[:, slice(*fs.local_range(w.shape[1], "data", size=h.shape[1]))]
        return nn.cross_entropy(nn.linear(part, w.mT, b, axis="data", split="row"), y, donate=True), state

    def step(self) -> Any:
        """Return the mapped step: (trees, x, y) -> (loss, trees)."""

        def body(trees: Any, x: Tensor, y: Tensor) -> Any:
            loss_fn = lambda params: self.loss(params, trees["state"], x, y)  # noqa: E731
            if self.chunked:
                step = fs.value_and_update(loss_fn, self.opt, in_backward="fc.w", has_aux=True)
                (loss, state), params, opt = step(trees["params"], trees["opt"])
            else:
                (loss, state), grads = fs.value_and_grad(loss_fn, has_aux=True)(trees["params"])
                params, opt = self.opt.update(grads, trees["opt"], trees["params"])
            return loss, {"params": params, "opt": opt, "state": state}

        return fs.shard_map(body, mesh=self.mesh, in_specs=(self.tree_specs, P("data"), P("data")),
                            out_specs=(P(), self.tree_specs), donate=0, check="never")  # fmt: skip


def predict(cfg: resnet.Config, head: str, ranks: int, batch: int, pixels: int) -> Prediction:
    """Return the bytes of a rank, from shapes."""
    run = Run(cfg, head, fs.make_mesh(kind="abstract", data=ranks), batch)
    x = fs.init.zeros((batch, cfg.num_channels, pixels, pixels))
    memory = fs.plan(run.step(), run.trees, x, fs.init.zeros((batch,), dtype=torch.int64)).memory
    return Prediction(memory.arguments, memory.peak, memory.parts["activations"])


def measure(cfg: resnet.Config, head: str, batch: int, pixels: int) -> tuple[int, int]:
    """Return the bytes of the arguments, and the most at one time, in a step that one rank runs."""
    run, arguments = Run(cfg, head, fs.make_mesh(data=1), batch), 0

    def setup() -> Callable[[], object]:
        nonlocal arguments
        trees = fs.materialize(run.trees, run.tree_specs, run.mesh, key=fs.key(0))
        x = fs.random.normal(fs.key(1), (batch, cfg.num_channels, pixels, pixels))
        y = torch.arange(batch) % cfg.num_labels
        arguments = sum(leaf.shards[0].nbytes for leaf in fs.tree.leaves(trees)) + x.nbytes + y.nbytes
        step = run.step()

        def once() -> None:
            nonlocal trees
            _, trees = step(trees, x, y)

        return once

    cost = measure_step(setup, warmup=1)
    return arguments, cost.peak - (cost.start - arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), choices=CLASSES)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, from shapes; load {os.getloadavg()[0]:.1f}; ResNet-50, 224 px, global batch "
          "256, SGD with momentum; MiB of a rank: predicted, [published], (share that is activations)")  # fmt: skip
    rows = []
    for ranks in args.ranks:
        print(f"\n{ranks} ranks   " + "".join(f"{head:>24s}" for head in HEADS))
        for name in args.classes:
            line = f"{name:>8s}   "
            for i, head in enumerate(HEADS):
                found = predict(resnet.Config.of(50, num_labels=CLASSES[name]), head, ranks, 256, 224)
                known = PUBLISHED[name][i] if i < 7 and (ranks == 16) == (name == "2M") else None
                rows.append({"ranks": ranks, "classes": CLASSES[name], "head": head, "published_mib": known,
                             **asdict(found)})  # fmt: skip
                peak = found.peak / MIB
                over = "*" if peak > LIMIT else " "
                published = f"[{known}]" if known else ""
                line += f"{peak:9.0f}{over} {published:>7s} ({found.activations / found.peak:3.0%})"
            print(line, flush=True)
    print(f"\n* more than the {LIMIT} MiB of the GPUs of the published figures")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

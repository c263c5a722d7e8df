"""Memory of a ResNet-50 with many classes, from shapes alone: `python -m tests.benchmarks.predict_classes`.

One rank of an abstract mesh runs a train step on fake tensors, forward, backward and SGD with momentum, and the bytes
of the storages that are alive are followed. Nothing is computed. `tests/e2e/test_benchmarks.py` asserts that the
prediction is what a real step of a small ResNet allocates. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn, optim
from fshard.models import resnet
from tests.lib.operations import Operations

from .init import MIB

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
    """Bytes of one rank: the arguments of a step, what it keeps from forward to backward, and the most at one time."""

    arguments: int
    activations: int
    peak: int


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

    def step(self, watched: Watched | None = None) -> Any:
        """Return the mapped step: (trees, x, y) -> (loss, trees)."""

        def body(trees: Any, x: Tensor, y: Tensor) -> Any:
            def loss_fn(params: Any) -> Any:
                out = self.loss(params, trees["state"], x, y)
                if watched is not None:
                    watched.note_forward()
                return out

            if self.chunked:
                step = fs.value_and_update(loss_fn, self.opt, in_backward="fc.w", has_aux=True)
                (loss, state), params, opt = step(trees["params"], trees["opt"])
            else:
                (loss, state), grads = fs.value_and_grad(loss_fn, has_aux=True)(trees["params"])
                params, opt = self.opt.update(grads, trees["opt"], trees["params"])
            return loss, {"params": params, "opt": opt, "state": state}

        def observed(trees: Any, x: Tensor, y: Tensor) -> Any:
            if watched is None or (self.mesh.kind != "abstract" and int(fs.axis_index("data"))):
                return body(trees, x, y)
            watched.arguments = sum(t.nbytes for t in fs.tree.leaves((trees, x, y)))
            with watched.operations:
                return body(trees, x, y)

        return fs.shard_map(observed, mesh=self.mesh, in_specs=(self.tree_specs, P("data"), P("data")),
                            out_specs=(P(), self.tree_specs), donate=0, check="never")  # fmt: skip


class Watched:
    """The memory of the body of a step."""

    def __init__(self) -> None:
        self.operations, self.arguments, self.forward = Operations(), 0, 0

    def note_forward(self) -> None:
        self.forward = self.operations.live

    def prediction(self) -> Prediction:
        return Prediction(self.arguments, self.forward, self.arguments + self.operations.peak)


def predict(cfg: resnet.Config, head: str, ranks: int, batch: int, pixels: int) -> Prediction:
    """Return the bytes of a rank, from shapes."""
    run, watched = Run(cfg, head, fs.make_mesh(kind="abstract", data=ranks), batch), Watched()
    x = fs.init.zeros((batch, cfg.num_channels, pixels, pixels))
    run.step(watched)(run.trees, x, fs.init.zeros((batch,), dtype=torch.int64))
    return watched.prediction()


def measure(cfg: resnet.Config, head: str, ranks: int, batch: int, pixels: int) -> Prediction:
    """Return the bytes of the first rank of a simulated mesh, in a step that is run."""
    run, watched = Run(cfg, head, fs.make_mesh(kind="simulated", data=ranks), batch), Watched()
    trees = fs.materialize(run.trees, run.tree_specs, run.mesh, key=fs.key(0))
    x = fs.random.normal(fs.key(1), (batch, cfg.num_channels, pixels, pixels))
    y = torch.arange(batch) % cfg.num_labels
    _, trees = run.step()(trees, x, y)  # buffers that are made once
    run.step(watched)(trees, x, y)
    return watched.prediction()


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

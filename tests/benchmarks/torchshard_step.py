"""Memory that TorchShard published beside a plan of its program: `python -m tests.benchmarks.torchshard_step`.

The program is `projects/imagenet/main.py` of TorchShard 0.1.0 (89e21de) with ResNet-50 on 8 ranks: its cross-entropy
makes one-hot rows of all classes; its accuracy gathers the logits of all classes; gradients are set to zero and not
freed; `DistributedDataParallel` has a copy of those of the leaves that it sums. What shapes cannot know, CUDA's context
and the workspaces of cuDNN, is one number, fitted to the first row. `predict_classes.py` plans fshard's own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, devices, nn
from fshard.models import resnet

from .init import MIB
from .predict_classes import CLASSES, PUBLISHED, Run

RANKS, BATCH, PIXELS = 8, 256, 224
HEADS = {"replicated": 0, "row": 1, "column": 2}  # columns of `PUBLISHED`


class ParallelCrossEntropy(torch.autograd.Function):
    """Its cross-entropy of logits [B, C@data]: softmax and one-hot rows are kept for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, size: int) -> Tensor:
        x = logits.sub(fs.pmax(logits.max(-1, keepdim=True)[0], "data"))
        exp_sum = fs.psum(x.exp().sum(-1, keepdim=True), "data")
        softmax = x.exp().div(exp_sum)
        one_hot = torch.zeros(len(x), size).scatter_(1, targets[:, None], 1)
        one_hot = one_hot[:, slice(*fs.local_range(x.shape[1], "data", size=size))].contiguous()
        ctx.save_for_backward(softmax, one_hot)
        return torch.log(exp_sum).sub(fs.psum(x.mul(one_hot).sum(-1, keepdim=True), "data")).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, one_hot = ctx.saved_tensors
        return softmax.sub(one_hot).div_(len(softmax)).mul_(grad), None, None


@dataclass
class Theirs(Run):
    """Its train step; `outputs` are the logits that the loop over batches refers to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        apart: dict[str, Any] = {"fc": {}}  # not summed, or by a sum of fshard, which allocates its own
        self.trees |= {"grads": resnet.init(self.cfg), "buckets": {**resnet.init(self.cfg), **apart}}
        self.tree_specs |= {"grads": self.specs, "buckets": {**self.specs, **apart}}
        self.outputs: list[Tensor] = []

    def loss(self, params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        h, state = resnet.features(self.cfg, params, state, x, train=True, layout=self.layout)
        w, b, size = params["fc"]["w"], params["fc"]["b"], self.cfg.num_labels
        if self.head == "replicated":
            logits = nn.linear(h, fs.pvary(w, "data").mT, fs.pvary(b, "data"))
            loss = fs.pmean(torch.nn.functional.cross_entropy(logits, y), "data")
        else:
            h, y = fs.all_gather(h, "data"), fs.all_gather(y, "data", to="invariant")
            if self.head == "column":
                logits = nn.linear(h, w.mT, b)
                loss = ParallelCrossEntropy.apply(logits, y, size)
                with torch.no_grad():
                    parts = [torch.ones_like(logits) for _ in range(RANKS)]
                    flat = torch.empty(RANKS, *logits.shape)  # of the gather of a list
                    logits = torch.cat(parts, 1)
                    del parts, flat
            else:
                part = h[:, slice(*fs.local_range(w.shape[1], "data", size=h.shape[1]))]
                logits = nn.linear(part, w.mT, b, axis="data", split="row")
                loss = torch.nn.functional.cross_entropy(logits, y)
        self.outputs[:] = [logits.detach()]
        torch.topk(logits.detach(), 5)
        return loss, state

    def planned(self) -> fs.Plan:
        """Return the plan of one step."""
        own = {name: self.trees[name] for name in ("params", "opt", "state")}

        def step(trees: Any, x: Tensor, y: Tensor) -> Any:
            loss_fn = lambda p: self.loss(p, trees["state"], x, y)  # noqa: E731
            (loss, state), grads = fs.value_and_grad(loss_fn, has_aux=True)(trees["params"])
            params, opt = self.opt.update(grads, trees["opt"], trees["params"])
            return loss, {"params": params, "opt": opt, "state": state}

        f = fs.shard_map(step, mesh=self.mesh, in_specs=(self.tree_specs, P("data"), P("data")),
                         out_specs=(P(), {name: self.tree_specs[name] for name in own}), donate=0,
                         check="never")  # fmt: skip
        x = fs.init.zeros((self.batch, self.cfg.num_channels, PIXELS, PIXELS))
        return fs.plan(f, self.trees, x, fs.init.zeros((self.batch,), dtype=torch.int64), device=devices.A100)


def main() -> None:
    mesh, rest = fs.make_mesh(kind="abstract", data=RANKS), 0.0
    print(f"{'classes':>8}   " + "".join(f"{head:>30}" for head in HEADS))
    for name in ("1k", "50k", "100k", "500k", "1M"):
        line = f"{name:>8}   "
        for head, column in HEADS.items():
            known = PUBLISHED[name][column]
            if known is None:
                line += f"{'':>30}"
                continue
            plan = Theirs(resnet.Config.of(50, num_labels=CLASSES[name]), head, mesh, BATCH).planned()
            peak = plan.memory.peak / MIB
            rest = rest or known - peak
            line += f"{f'{peak + rest:,.0f} [{known:,}] {(peak + rest) / known - 1:+.1%}':>30}"
        print(line, flush=True)
    print(f"\nMiB of a rank: planned + {rest:,.0f} [published] difference")


if __name__ == "__main__":
    main()

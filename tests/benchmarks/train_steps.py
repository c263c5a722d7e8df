"""The train steps that `peers` compares: each builder returns a function from the number of a step to the rank's loss.

The ranks of a mesh are those of `torch.distributed`. All start from the same values and take the same batches in the
same order, with torch's fused AdamW.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fshard as fs
from fshard import P
from fshard.models import gpt2

from . import gpt_module

LR = 3e-4
BATCHES = 4  # repeated, so that the loss falls and shows a wrong step
KEY = fs.key(0)

Batch = tuple[Tensor, Tensor]
Step = Callable[[int], Tensor]


@dataclass(frozen=True)
class Size:
    """A model, the sequences of each rank, and the dtype of all its tensors."""

    cfg: gpt2.Config
    rows: int
    dtype: torch.dtype = torch.float32

    @property
    def parameters(self) -> int:
        return sum(leaf.numel() for leaf in fs.tree.leaves(gpt2.init(self.cfg)))


def _config(vocab: int, t: int, d: int, layers: int, heads: int) -> gpt2.Config:
    return gpt2.Config(vocab_size=vocab, n_positions=t, n_embd=d, n_layer=layers, n_head=heads)


SIZES = {
    "27M": Size(_config(8192, 256, 512, 6, 8), 4),
    "3x": Size(_config(8192, 256, 768, 9, 12), 4),
    "350M": Size(_config(50304, 1024, 1024, 24, 16), 8, torch.bfloat16),
    "tiny": Size(_config(96, 16, 32, 2, 4), 2),
}


def batches(size: Size, ranks: int, device: torch.device) -> list[Batch]:
    """The (ids, targets) of all ranks, each [B, T]; a few tokens are frequent, as in text."""
    shape = (BATCHES, ranks * size.rows, size.cfg.n_positions + 1)
    skewed = torch.rand(shape, generator=torch.Generator().manual_seed(1)) ** 3
    tokens = (skewed * size.cfg.vocab_size).long().to(device)
    return [(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in tokens]


def own_rows(batch: Batch) -> Batch:
    """This rank's rows."""
    ids, targets = (x.chunk(dist.get_world_size())[dist.get_rank()].contiguous() for x in batch)
    return ids, targets


# --- torch ----------------------------------------------------------------------------------------------------


def torch_step(size: Size, device: torch.device, wrap: Callable[..., nn.Module], *, compile: bool = False,
         rows: Callable[[Batch], Batch] = own_rows, context: Any = contextlib.nullcontext,
         zero: bool = False) -> Step:  # fmt: skip
    """A step of plain torch; `wrap` parallelizes the module, and compiles it if asked to."""
    model = wrap(gpt_module.build(size.cfg, KEY, device, size.dtype), device, compile)
    data = [rows(b) for b in batches(size, dist.get_world_size(), device)]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups(model), lr=LR, fused=True)
    if zero:  # the state of each parameter is on one rank
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    return optimized(lambda i: model(*data[i % BATCHES]), optimizer, context)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters in groups of one kind, DTensors or not, as the fused kernels need them."""
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == split] for split in (True, False)]
    return [{"params": kind} for kind in kinds if kind]


def optimized(loss_of: Step, optimizer: torch.optim.Optimizer, context: Any = contextlib.nullcontext) -> Step:
    """The step that minimizes the loss of a step."""

    def step(i: int) -> Tensor:
        with context():
            loss = loss_of(i)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return step


def unwrapped(model: gpt_module.GPT, device: torch.device, compile: bool) -> nn.Module:
    return torch.compile(model) if compile else model  # type: ignore[return-value]


def ddp(model: gpt_module.GPT, device: torch.device, compile: bool, *, view: bool) -> nn.Module:
    """`view`: gradients are views of the buckets they are reduced in, so that they exist once."""
    model = DistributedDataParallel(model, gradient_as_bucket_view=view)
    return torch.compile(model) if compile else model  # type: ignore[return-value]


def fsdp(model: gpt_module.GPT, device: torch.device, compile: bool, *, remat: bool) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for i, block in enumerate(model.h):
        block = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False) if remat else block
        model.h[i] = block
        if compile:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: gpt_module.GPT, device: torch.device, compile: bool) -> nn.Module:
    """Column then row in each block; rows of the embedding and columns of the tied head are split by vocabulary."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.h)):
        plan |= {f"h.{i}.{name}": ColwiseParallel() for name in ("qkv", "up")}
        plan |= {f"h.{i}.{name}": RowwiseParallel() for name in ("proj", "down")}
    parallelize_module(model, mesh, plan)
    model.tie()
    return torch.compile(model) if compile else model  # type: ignore[return-value]


# --- fshard ---------------------------------------------------------------------------------------------------


def train_step(
    cfg: gpt2.Config, mesh: fs.Mesh, layout: gpt2.Layout, specs: Any, *, remat: bool = False, compile: bool = False
) -> tuple[fs.optim.Optimizer, Any, Callable[[Any, Any], Any]]:
    """The optimizer, the specs of the train state, and the step: (state, batch) -> (state, loss)."""
    optimizer = fs.optim.adamw(LR)
    if layout.varied:
        split = fs.fully_shard(specs, gpt2.init(cfg), axis="data")
        optimizer = fs.optim.zero(optimizer, specs, split, axis="data")
    placed = {"params": specs, "opt": optimizer.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(layout.data)), out_specs=(placed, P()), donate=0, compile=compile)
    def step(state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return gpt2.loss(cfg, params, *batch, layout=layout, specs=specs, remat=remat)

        entered = fs.pvary(state["params"], "data") if layout.varied else state["params"]
        loss, grads = fs.value_and_grad(loss_fn)(entered)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, loss

    return optimizer, placed, step


def fshard_step(size: Size, device: torch.device, kind: str, *, remat: bool = False, compile: bool = False) -> Step:
    """Make a step whose data are split over ranks, each with a batch of its own, or not, by `kind`.

    "data": parameters are replicated, and for "zero" their state is split; "sharded": both are split; "tensor": tensor
    parallel; "one": one rank.
    """
    ranks, cfg = dist.get_world_size(), size.cfg
    tensor, one = kind == "tensor", kind == "one"
    model = None if kind in ("data", "zero", "sharded") else "model"
    layout = gpt2.Layout(None if tensor else "data", model, varied=kind == "zero")
    axes = {"model": ranks} if tensor else {"data": 1, "model": 1} if one else {"data": ranks}
    mesh = fs.make_mesh(kind="simulated" if one else "process", device=device, **axes)
    described = gpt2.init(cfg)
    specs = gpt2.specs(cfg, model=layout.model)
    if kind == "sharded":
        specs = fs.fully_shard(specs, described, axis="data")
    optimizer, placed, step = train_step(cfg, mesh, layout, specs, remat=remat, compile=compile)
    state = fs.materialize({"params": described, "opt": optimizer.init(described)}, placed, mesh, key=KEY,
                           dtype=size.dtype)  # fmt: skip
    data = [own_rows(b) if one else b for b in batches(size, ranks, device)]
    data = [fs.device_put(b, P(layout.data), mesh) for b in data]

    def run(i: int) -> Tensor:
        nonlocal state
        state, loss = step(state, data[i % BATCHES])
        return loss.shards[0]

    return run


# --- all of them ----------------------------------------------------------------------------------------------

TORCH: dict[str, Callable[..., Step]] = {
    "floor": functools.partial(torch_step, wrap=unwrapped),
    "ddp": functools.partial(torch_step, wrap=functools.partial(ddp, view=False)),
    "ddp view": functools.partial(torch_step, wrap=functools.partial(ddp, view=True)),
    "ddp+zero": functools.partial(torch_step, wrap=functools.partial(ddp, view=True), zero=True),
    "fsdp2": functools.partial(torch_step, wrap=functools.partial(fsdp, remat=False)),
    "fsdp2+ac": functools.partial(torch_step, wrap=functools.partial(fsdp, remat=True)),
    "dtensor": functools.partial(torch_step, wrap=tensor_parallel, rows=lambda b: b, context=loss_parallel),
}
FSHARD: dict[str, Callable[..., Step]] = {
    "data": functools.partial(fshard_step, kind="data"),
    "zero": functools.partial(fshard_step, kind="zero"),
    "sharded": functools.partial(fshard_step, kind="sharded"),
    "sharded+remat": functools.partial(fshard_step, kind="sharded", remat=True),
    "tensor": functools.partial(fshard_step, kind="tensor"),
    "one": functools.partial(fshard_step, kind="one"),
}
BUILD = TORCH | FSHARD


def build(name: str, size: Size, device: torch.device) -> Step:
    """The step of this name: one of `BUILD`, with " compiled" appended for the compiled one."""
    base = name.removesuffix(" compiled")
    return BUILD[base](size, device, compile=base != name)

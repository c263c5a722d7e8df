"""torchtitan's train step of a Llama as a mapped function: its arithmetic, operation for operation, and its schedule.

For predictions of what torchtitan measured, and not for training: `fshard.models.llama` computes the same numbers with
fewer operations and less memory. Written after torchtitan at 9dec370 (December 2024), `models/llama/model.py` and
`parallelisms/parallelize_llama.py`: norms and rotations in float32 from single operations, keys and values repeated for
each head, float32 logits, FSDP2 of each block and of the rest, tensor and sequence parallelism, and activation
checkpointing that is full, of every second block, or of all but attention and every second product. In a pipeline,
as in `parallelisms/pipeline_llama.py` there, weights are gathered once and kept, in float8 if the products are, and
their gradients are summed over the microbatches in float32 before they are summed over the ranks.

KempnerForge's program differs, by its code at 5666d0d (`distributed/tensor_parallel.py`, `model/`, `training/loss.py`):
each of the products q, k, v, up and gate gathers its input, and sums its gradient; the table is full on each rank, and
the logits are gathered for a loss in their dtype; halves are rotated in half precision. Its pipelines have no sequence
parallelism, and the head is full on each rank. Its profile of 24 GPUs counts the 12 gathers and 8 sums of a block.

Legend: B batch, T time, D width, H heads, G heads of keys and values, K head width, F hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fshard as fs
from fshard import P, nn, optim

Checkpointing = Literal["none", "full", "selective layer", "selective op"]
_PRODUCTS = 7  # of a block
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # of fake tensors on a CPU
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama."""

    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocab: int = 128256

    @property
    def head_width(self) -> int:
        return self.width // self.heads


LLAMA = {
    "Llama 3 8B": Sizes(4096, 32, 32, 8, 14336),
    "Llama 3 70B": Sizes(8192, 80, 64, 8, 28672),
    "Llama 3 405B": Sizes(16384, 126, 128, 8, 53248),
    "Llama 2 13B": Sizes(5120, 40, 40, 40, 13824, 32000),
    "Llama 2 70B": Sizes(8192, 80, 64, 8, 28672, 32000),
}


@dataclass(frozen=True)
class Layout:
    """FSDP over `data`, tensor and sequence parallelism over `model`, tokens of each data rank, and checkpointing."""

    sizes: Sizes
    data: int
    model: int
    batch: int  # of each data rank
    time: int
    checkpointing: Checkpointing
    compiled: bool = False  # a compiled block saves no result that backward does not read, such as its last product
    dtype: torch.dtype = torch.bfloat16
    stage: int = 1
    microbatches: int = 1
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    float8: bool = False  # weights that a pipeline keeps
    program: Literal["torchtitan", "KempnerForge"] = "torchtitan"
    compiled_loss: bool = False  # keeps no float32 array of its logits

    @property
    def is_forge(self) -> bool:
        return self.program == "KempnerForge"

    @property
    def sequence(self) -> bool:
        """True if the stream is split along time."""
        return not (self.is_forge and self.stage > 1)

    @property
    def head_axis(self) -> str | None:
        """The axis that splits the head."""
        return self.axis if self.sequence else None

    @property
    def chunks(self) -> int:
        """The parts of the model on each stage: 2 is torchtitan's default of an interleaved schedule."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def axis(self) -> str | None:
        """The axis of tensor parallelism."""
        return "model" if self.model > 1 else None


def init(s: Sizes) -> Any:
    """The described parameters, in float32."""
    d, k = s.width, s.head_width
    normal, ones = functools.partial(fs.init.normal, std=0.02), fs.init.ones
    block = lambda: {  # noqa: E731
        "norm_1": ones(d), "q": normal((d, s.heads * k)), "k": normal((d, s.groups * k)),
        "v": normal((d, s.groups * k)), "o": normal((s.heads * k, d)), "norm_2": ones(d),
        "up": normal((d, s.hidden)), "gate": normal((d, s.hidden)), "down": normal((s.hidden, d)),
    }  # fmt: skip
    return {"wte": normal((s.vocab, d)), "h": [block() for _ in range(s.layers)], "norm": ones(d),
            "head": normal((d, s.vocab))}  # fmt: skip


def specs(layout: Layout) -> Any:
    """Columns, rows and the vocabulary over `model`; all leaves fully sharded over `data`."""
    m = layout.axis
    column, row = P(None, m), P(m)
    block = {"norm_1": P(), "q": column, "k": column, "v": column, "o": row, "norm_2": P(), "up": column,
             "gate": column, "down": row}  # fmt: skip
    table, column = P() if layout.is_forge else row, P(None, layout.head_axis)
    whole = {"wte": table, "h": [block] * layout.sizes.layers, "norm": P(), "head": column}
    return fs.fully_shard(whole, init(layout.sizes), axis="data")


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * w


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of neighbours: x [B, T, H, K], angles [T, K / 2], complex."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of an element of each half, in the dtype of x."""
    a, b = x.chunk(2, -1)
    cos, sin = (y[:, None].to(x.dtype) for y in (angles.real, angles.imag))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def gathered(layout: Layout, x: Tensor, products: int) -> list[Tensor]:
    """Return the inputs of products with split columns: one for all, or with KempnerForge one for each."""
    m = layout.axis
    inputs = [fs.all_gather(x, m, 1, size=layout.time) if layout.sequence else fs.pvary(x, m)
              for _ in range(products if layout.is_forge else 1)]  # fmt: skip
    return inputs if layout.is_forge else inputs * products


def summed(layout: Layout, x: Tensor) -> Tensor:
    """Return the sum of a product with split rows, as the stream has it."""
    return fs.psum_scatter(x, layout.axis, 1) if layout.sequence else fs.psum(x, layout.axis)


def embedded(layout: Layout, ids: Tensor, table: Tensor) -> Tensor:
    m, size = layout.axis, layout.sizes.vocab
    if layout.is_forge:
        x = nn.embedding(ids, table)
        return fs.pslice(x, m, 1) if layout.sequence else x
    return fs.psum_scatter(nn.embedding(ids, table, axis=m, size=size), m, 1)


def angles_of(time: int, width: int) -> Tensor:
    rates = 1.0 / 500000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(time).float(), rates)
    return torch.polar(torch.ones_like(angles), angles)


def block(layout: Layout, angles: Tensor, p: Any, x: Tensor) -> Tensor:
    """One block; x is the stream, [B, T, D], or [B, T@model, D]."""
    s = layout.sizes
    varied = lambda w: fs.pvary(w, layout.axis) if layout.sequence else w  # noqa: E731
    b, k = x.shape[0], s.head_width
    inputs = zip("qkv", gathered(layout, rms_norm(x, varied(p["norm_1"])), 3), strict=True)
    q, keys, values = (product(h, p[name]).view(b, layout.time, -1, k) for name, h in inputs)
    q, keys = ((rotate_halves if layout.is_forge else rotate)(y, angles) for y in (q, keys))
    keys, values = (
        y[:, :, :, None].expand(-1, -1, -1, s.heads // s.groups, -1).reshape(q.shape) for y in (keys, values)
    )
    a = torch.nn.functional.scaled_dot_product_attention(
        *(y.transpose(1, 2) for y in (q, keys, values)), is_causal=True
    )
    a = a.transpose(1, 2).contiguous().view(b, layout.time, -1)
    x = x + summed(layout, product(a, p["o"]))
    up, gate = gathered(layout, rms_norm(x, varied(p["norm_2"])), 2)
    h = torch.nn.functional.silu(product(up, p["up"])) * product(gate, p["gate"])
    return x + summed(layout, product(h, p["down"]))


def checkpointed(layout: Layout, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the block with its activation checkpointing, but for "full" and "none", which `scan` does itself."""
    if layout.checkpointing == "selective op":

        def contexts() -> Any:
            products = {False: 0, True: 0}

            def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                if op is torch.ops.aten.mm.default:
                    products[ctx.is_recompute] += 1
                    nth = products[ctx.is_recompute]
                    saved = nth % 2 == 1 and not (layout.compiled and nth == _PRODUCTS)
                else:
                    saved = op in _ATTENTION
                return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

            return create_selective_checkpoint_contexts(policy)

        return lambda p, x, *_: checkpoint(f, p, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    if layout.checkpointing == "selective layer":
        return lambda p, x, i: fs.remat(f)(p, x) if i % 2 else f(p, x)
    return lambda p, x, *_: f(p, x)


def loss(layout: Layout, spec: Any, params: Any, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the global batch, of ids and targets [B, T] of this data rank."""
    s = layout.sizes
    shapes = init(s)
    top = {name: params[name] for name in ("wte", "norm", "head")}
    top = fs.unshard(top, {name: spec[name] for name in top}, "data", shapes={name: shapes[name] for name in top},
                     dtype=layout.dtype, reduce_dtype=torch.float32)  # fmt: skip
    angles = angles_of(layout.time, s.head_width)
    x = embedded(layout, ids, top["wte"])
    one = checkpointed(layout, functools.partial(block, layout, angles))
    each = list(range(s.layers)) if layout.checkpointing == "selective layer" else None
    x = fs.scan(one, params["h"], x, specs=spec["h"], axis="data", shapes=shapes["h"], dtype=layout.dtype, each=each,
                reduce_dtype=torch.float32, remat=layout.checkpointing == "full")  # fmt: skip
    return head(layout, top, x, targets)


def head(layout: Layout, top: Any, x: Tensor, targets: Tensor) -> Tensor:
    """The norm, the logits and the loss of the stream after the last block."""
    m = layout.head_axis
    x = fs.all_gather(rms_norm(x, fs.pvary(top["norm"], m)), m, 1, size=layout.time)
    logits = product(x, top["head"])  # kept until the loss is computed, as by the caller of a module
    if layout.is_forge:
        logits = fs.all_gather(logits, m, 2, to="invariant", size=layout.sizes.vocab)
        value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        return fs.pmean(value.float(), "data")
    if layout.compiled_loss:
        return fs.pmean(nn.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), axis=m), "data")
    if m is None:
        return fs.pmean(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1)), "data")
    value = ParallelCrossEntropy.apply(logits.flatten(0, 1).float(), targets.flatten(0, 1), layout)
    return fs.pmean(value, "data")


class ParallelCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of torch's `loss_parallel`, of float32 logits [BT, V@model], with its temporary arrays."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, layout: Layout) -> Tensor:
        shifted = logits - fs.pmax(logits.amax(-1, keepdim=True), layout.axis)
        total = fs.psum(torch.exp(shifted).sum(-1, keepdim=True), layout.axis)
        logp = shifted - total.log()
        start, stop = fs.local_range(logp.shape[1], layout.axis, size=layout.sizes.vocab)
        own = (targets >= start) & (targets < stop)
        local = torch.where(own, targets - start, 0)
        ctx.save_for_backward(logp, own, local)
        return fs.psum(-torch.where(own, logp.gather(1, local[:, None])[:, 0], 0.0).mean(), layout.axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logp, own, local = ctx.saved_tensors
        grads = torch.zeros_like(logp)
        grads.scatter_(1, local[:, None], -own.to(logp.dtype)[:, None])
        return (grads + torch.exp(logp)) * (grad / len(logp)), None, None


# --- pipelines --------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """A gathered weight, and where its gradient is summed over microbatches: float32 zeros that take no memory."""

    values: Tensor
    sums: Tensor

    def whole(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) + self.sums.to(dtype)


def product(x: Tensor, w: Tensor | Weight) -> Tensor:
    return x @ w if isinstance(w, Tensor) else SummedProduct.apply(x, *w)


class SummedProduct(torch.autograd.Function):
    """x @ w, whose gradient by w is that by `sums`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, sums: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.to(x.dtype).t(), None, (x.flatten(0, 1).t() @ grad.flatten(0, 1)).float()


def layers_of(params: Any) -> list[Any]:
    """Return the layers of a pipeline: the embedding, the blocks, and the norm with the head.

    So the stages have as many blocks as torchtitan's: one less on the first and on the last.
    """
    return [{"wte": params["wte"]}, *params["h"], {name: params[name] for name in ("norm", "head")}]


def pipelined_loss(layout: Layout, spec: Any, layers: Any, ids: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    """Return the loss of `loss`, and its gradients, of layers on stages; `spec` is theirs."""
    s, m, shapes = layout.sizes, layout.axis, layers_of(init(layout.sizes))
    gathers = [functools.partial(fs.unshard, specs=specs, axis="data", shapes=like, dtype=layout.dtype,
                                 reduce_dtype=torch.float32) if any(x.numel() for x in layer.values()) else None
               for layer, specs, like in zip(layers, spec, shapes, strict=True)]  # fmt: skip
    whole = []
    for gather, layer in zip(gathers, layers, strict=True):
        values, small = gather(layer) if gather else layer, layout.float8 and "q" in layer
        whole.append({name: x.to(torch.float8_e4m3fn) if small and x.ndim > 1 else x for name, x in values.items()})
        del values
    # one zero for each leaf, made of it so that it varies over the same axes
    sums = [{name: (0 * x.flatten()[:1].float()).sum().expand(x.shape) for name, x in layer.items()} for layer in whole]
    angles = angles_of(layout.time, s.head_width)

    def first(_: Any, batch: Any) -> Any:
        b, t = batch["ids"].shape
        x = torch.zeros((), dtype=layout.dtype).expand(b, t // layout.model if layout.sequence else t, s.width)
        return {
            "x": fs.pvary(x, ("stage", "data", m) if m and layout.sequence else ("stage", "data")),
            "loss": fs.pvary(torch.zeros(()), "stage"),
        }

    def stage(sums: Any, h: Any, batch: Any, values: Any) -> Any:
        p = {name: Weight(values[name], x) for name, x in sums.items()}
        norms = {name: w.whole(layout.dtype) for name, w in p.items() if name.startswith("norm")}
        if "wte" in p:
            return {**h, "x": embedded(layout, batch["ids"], p["wte"].whole(layout.dtype))}
        if "head" in p:
            return {**h, "loss": head(layout, p | norms, h["x"], batch["targets"])}
        run = functools.partial(block, layout, angles)
        run = fs.remat(run) if layout.checkpointing == "full" else run
        return {**h, "x": run(p | norms, h["x"])}

    run = fs.pipelined(first, stage, lambda _, h, batch: h["loss"], axis="stage", microbatches=layout.microbatches,
                       schedule=layout.schedule, chunks=layout.chunks)  # fmt: skip
    value, (_, grads) = run(({}, sums), {"ids": ids, "targets": targets}, each=whole)
    del whole
    for i, (gather, layer) in enumerate(zip(gathers, layers, strict=True)):  # vjp keeps what it gathers: only here
        given = {name: g.to(layout.dtype) for name, g in grads[i].items()}
        grads[i] = torch.func.vjp(gather, layer)[1](given)[0] if gather else layer
    return value, grads


def step_of(layout: Layout, *, kind: str = "abstract") -> tuple[Any, tuple[Any, ...]]:
    """Return the mapped step, (params, state, ids, targets) -> (loss, params, state), and its described arguments."""
    sizes = {"stage": layout.stage} if layout.stage > 1 else {}
    mesh = fs.make_mesh(kind=kind, **sizes, data=layout.data, model=layout.model)
    params, spec = init(layout.sizes), specs(layout)
    if layout.stage > 1:
        params = layers_of(params)
        spec = fs.on_stages(layers_of(spec), params, "stage", layout.stage, chunks=layout.chunks)
    opt = optim.chain(optim.clip_by_global_norm(1.0, spec), optim.adamw(3e-4, weight_decay=0.1))
    state_specs = opt.specs(spec)

    def step(params: Any, state: Any, ids: Tensor, targets: Tensor) -> Any:
        if layout.stage > 1:
            value, grads = pipelined_loss(layout, spec, params, ids, targets)
        else:
            one = functools.partial(loss, layout, spec)
            gradient = fs.accumulate(one, layout.microbatches) if layout.microbatches > 1 else fs.value_and_grad(one)
            value, grads = gradient(params, ids, targets)
        params, state = opt.update(grads, state, params)
        return value, params, state

    f = fs.shard_map(step, mesh=mesh, in_specs=(spec, state_specs, P("data"), P("data")),
                     out_specs=(P(), spec, state_specs), donate=(0, 1))  # fmt: skip
    tokens = fs.init.zeros((layout.batch * layout.data, layout.time), dtype=torch.int64)
    return f, (params, opt.init(params), tokens, tokens)

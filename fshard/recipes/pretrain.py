"""Pretrain a small GPT-2 on the source code of the Python that runs this, byte by byte.

    python -m fshard.recipes.pretrain                                         one device
    python -m fshard.recipes.pretrain --mesh data=2,model=2                   four simulated devices: the same losses
    torchrun --nproc-per-node 4 -m fshard.recipes.pretrain --mesh data=2,model=2 --fsdp --sequence-parallel
    python -m fshard.recipes.pretrain --mesh data=4 --zero                    full parameters, their AdamW state split
    python -m fshard.recipes.pretrain --mesh data=2,seq=2 --context 4096      each sequence split over two devices
    python -m fshard.recipes.pretrain --mesh data=2,stage=2 --schedule 1f1b --microbatches 4    blocks on two stages
    python -m fshard.recipes.pretrain --resume out --mesh model=4 --steps 2000  resume on another mesh
    python -m fshard.recipes.pretrain --mesh data=2,model=2 --fsdp --verify   verify the step before training
    python -m fshard.recipes.pretrain --mesh data=4 --experts 8               a Mixtral, whose experts all ranks split

One tree, the train state, has everything a run needs: parameters, optimizer moments, the step and the key. The batch of
a step is a function of the key and the step. So the state is the checkpoint, and a run can resume from it on any mesh.

Legend: B batch, T time, V vocabulary; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fshard as fs
from fshard import P, checkpoint, data, optim
from fshard._core.files.io import open_file
from fshard.models import gpt2, mixtral, stages

from . import command
from .command import DTYPES, POSITIVE, Refusal, at_least, option
from .log import Log, printer

FILE = 256  # the token between files; 0 to 255 are bytes
VOCAB = 257
EXCLUDED = {  # directories of the standard library
    "test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "__pycache__",
}  # fmt: skip


@dataclass
class Options(command.Options):
    """Pretrain a small GPT-2 on the source code of the Python that runs this, byte by byte."""

    name = "pretrain"
    may_differ = ("fsdp", "zero", "sequence_parallel", "text", "steps", "batch", "dropout", "lr", "dtype", "compile",
                  "remat", "verify", "sample", "prompt", "schedule", "microbatches")  # fmt: skip

    steps: int = option(1900, rule=at_least(1))
    batch: int = option(8, "sequences per step, over all devices", rule=at_least(1))
    lr: float = option(4e-3, rule=POSITIVE)
    fsdp: bool = option(False, "shard parameters and optimizer state over data too")
    zero: bool = option(False, "shard only the optimizer state, over data and seq (ZeRO-1)")
    sequence_parallel: bool = option(False, "split the residual stream along time over model")
    text: Path | None = option(None, "train on this file instead of the standard library")
    context: int = option(128, "tokens per sequence", rule=at_least(1))
    layers: int = option(4, rule=at_least(1))
    heads: int = option(4, rule=at_least(1))
    width: int = option(128, rule=at_least(1))
    experts: int = option(
        0, "train a Mixtral with this many experts in each layer, split over all ranks", rule=at_least(0)
    )
    dropout: float = option(0.0, rule=command.RATE)
    dtype: str = option("float32", "to compute with; parameters stay float32", choices=DTYPES)
    compile: bool = option(False, "compile the step as one graph")
    remat: bool = option(False, "recompute blocks in the backward pass")
    schedule: str = option(
        "1f1b", "of the stages of a mesh like data=2,stage=2", choices=("gpipe", "1f1b", "zero_bubble")
    )
    microbatches: int = option(4, "of a step, with stages", rule=at_least(1))
    verify: bool = option(False, "before training, compare the step on smaller meshes")
    sample: int = option(0, "at the end, generate this many bytes of text", rule=at_least(0))
    prompt: str = option("def ", "the beginning of that text")

    def axes(self) -> dict[str, str]:
        more = {name: part for name, part in (("stage", "layers"), ("seq", "context")) if f"{name}=" in self.mesh}
        return {"data": "batch", **more, "model": "width"}

    def problems(self) -> list[str]:
        problems = super().problems()
        if not problems and self.width % self.heads:
            divisor = max(n for n in range(1, min(self.heads, self.width) + 1) if self.width % n == 0)
            problems.append(f"--heads {self.heads}: must divide --width, and {self.width} % {self.heads} = "
                            f"{self.width % self.heads}: give --heads {divisor}")  # fmt: skip
        if "stage=" in self.mesh and (self.zero or self.compile):
            problems.append(f"--mesh {self.mesh}: stage= takes neither --zero nor --compile: leave them out")
        if "stage=" in self.mesh and self.batch % self.microbatches:
            problems.append(f"--microbatches {self.microbatches}: must divide --batch, and {self.batch} % "
                            f"{self.microbatches} = {self.batch % self.microbatches}")  # fmt: skip
        if self.experts and self.zero:
            problems.append("--experts --zero: experts are split with their state: give --fsdp for the rest")
        if self.fsdp and self.zero:
            problems.append(
                "--fsdp --zero: fully sharded parameters have a sharded optimizer state: give one of the two"
            )
        return problems


# --- text -----------------------------------------------------------------------------------------------------


def standard_library() -> Iterator[tuple[str, bytes]]:
    """Yield (name, source) of every module of the running Python, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not EXCLUDED & set(path.relative_to(root).parts):
            yield path.relative_to(root).as_posix(), path.read_bytes()


def tokens(text: Path | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return (training, validation) tokens, int16; every 20th file, by its name, or the end of the text is held out."""
    if text is not None:
        with open_file(text, "give a file of text") as f:
            every = np.frombuffer(f.read(), np.uint8).astype(np.int16)
        return every[: len(every) * 19 // 20], every[len(every) * 19 // 20 :]
    parts: tuple[list[Any], list[Any]] = ([], [])
    for name, source in standard_library():
        held_out = zlib.crc32(name.encode()) % 20 == 0
        parts[held_out].append(np.concatenate([[FILE], np.frombuffer(source, np.uint8)]).astype(np.int16))
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def batches(
    text: np.ndarray[Any, Any], length: int, batch: int, key: Tensor | None, mesh: fs.Mesh,
    name: str = "text to train on",
) -> Any:  # fmt: skip
    """Return a function from a step to its placed batch {"ids", "targets"}, [B@data, T@seq]; a rank reads its rows."""
    size = (len(text) - 1) // length
    if size < batch:
        raise Refusal(f"the {name} has {len(text)} tokens, fewer than {batch} sequences of {length} + 1: "
                      f"give a longer --text, or less --batch or --context")  # fmt: skip

    def fetch(rows: Any) -> dict[str, Tensor]:
        ids = data.crop(text, rows * length, length=length + 1)
        return {"ids": ids[:, :-1], "targets": ids[:, 1:]}

    def load(step: int) -> Any:
        rows = data.indices(key, step=step, size=size, batch=batch)
        return data.load(fetch, rows, mesh=mesh, spec=tokens_spec(mesh))

    return load


def tokens_spec(mesh: fs.Mesh) -> P:
    """Return the spec of a batch of tokens."""
    return P("data", "seq") if "seq" in mesh.axes else P("data")


# --- training -------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> float:
    """Train, and return the validation loss in nats per token."""
    return Options.run(train, argv)


def train(args: Options) -> float:
    begin = args.check_folders()
    mesh = args.make_mesh()
    say = printer()
    start = time.time()

    # The train state as a description, and its specs.
    model, cfg, split = architecture(args)
    layout = gpt2.Layout("data", "model", args.sequence_parallel, varied=args.zero, experts=split.get("experts"),
                         context="seq" if "seq" in mesh.axes else None)  # fmt: skip
    policy = fs.Policy(compute=DTYPES[args.dtype])
    described = model.init(cfg)
    specs = model.specs(cfg, model="model", **split)
    if args.fsdp:
        specs = fs.fully_shard(specs, described, axis="data")
    if "stage" in mesh.axes:
        specs["h"] = fs.on_stages(specs["h"], described["h"], "stage", mesh.axes["stage"])
        layout = replace(layout, stage="stage", dtype=policy.compute, reduce_dtype=torch.float32)
    build: Any = stages.pipelined
    staged = partial(build, cfg, layout=layout, specs=specs, schedule=args.schedule, remat=args.remat)
    over = tokens_spec(mesh).axes
    optimizer = make_optimizer(args, described, specs, zero=over if args.zero else (), weight_decay=0.1)
    key = fs.key(args.seed)
    state = {"params": described, "opt": optimizer.init(described)}
    state_specs = {"params": specs, "opt": optimizer.specs(specs), "key": P(), "step": P()}
    like = {**state, "key": key, "step": torch.tensor(0)}
    text, held_out = tokens(args.text)
    train_batch = batches(text, args.context, args.batch, fs.fold_in(key, "data"), mesh)
    eval_batch = batches(held_out, args.context, args.batch, None, mesh, "held-out twentieth of the text")
    the_same = "the same --text, or run the same Python, whose source code is the default"
    args.check_same_run(text=(zlib.crc32(text.tobytes()), the_same))
    if args.resume:
        state = checkpoint.restore(args.resume, like, specs=state_specs, mesh=mesh, step=begin)
    else:
        state = fs.materialize(like, state_specs, mesh, key=fs.fold_in(key, "init"))
    params = sum(x.numel() for x in fs.tree.leaves(state["params"]))
    say(f"{params / 1e6:.2f}M parameters on {mesh!r}" + (f", resumed at step {begin}" if begin else ""))

    def loss_fn(params: Any, ids: Tensor, targets: Tensor, key: Tensor | None) -> Tensor:
        params = policy.to_compute(params)
        loss: Tensor = model.loss(cfg, params, ids, targets, layout=layout, specs=specs, key=key, remat=args.remat)
        return loss

    in_specs = (state_specs, tokens_spec(mesh))

    @fs.shard_map(mesh=mesh, in_specs=in_specs, out_specs=(state_specs, P()), donate=0, compile=args.compile)
    def train_step(state: Any, batch: Any) -> Any:
        key = fs.fold_in(state["key"], state["step"]) if args.dropout else None
        params = fs.pvary(state["params"], over) if args.zero else state["params"]
        step = staged(microbatches=args.microbatches) if layout.stage else fs.value_and_grad(loss_fn)
        loss, grads = step(params, batch["ids"], batch["targets"], key)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        state = {"params": params, "opt": opt, "key": state["key"], "step": state["step"] + 1}
        return state, {"loss": loss, "grad_norm": opt[0]["norm"]}

    @fs.shard_map(mesh=mesh, in_specs=(specs, tokens_spec(mesh)), out_specs=P())
    def eval_step(params: Any, batch: Any) -> Tensor:
        if layout.stage:
            mean: Tensor = staged(microbatches=args.microbatches).loss(params, batch["ids"], batch["targets"])
            return mean
        with torch.no_grad():
            return loss_fn(params, batch["ids"], batch["targets"], None)

    if args.verify:
        # A compiled step gets the shape of training, so that it is compiled once.
        rows = args.batch if args.compile or layout.stage else min(args.batch, 2 * mesh.axes["data"])
        batch = batches(text, args.context, rows, fs.fold_in(key, "data"), mesh)(begin)
        policy = fs.Policy(compute=torch.float32)  # rounding to half precision would hide small mistakes
        args.verify_step(train_step, say, with_second_moments(state, mesh), batch)
        policy = fs.Policy(compute=DTYPES[args.dtype])
    schedule = learning_rate(args)
    out = args.out or args.resume
    with Log(args, begin, args.steps, say, out) as log:
        for step in range(begin, args.steps):
            clock = time.perf_counter()
            state, metrics = train_step(state, train_batch(step))
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            seconds = time.perf_counter() - clock
            log.write(step=step, loss=loss, grad_norm=norm, lr=float(schedule(step)),
                      tokens_per_s=args.batch * args.context / seconds)  # fmt: skip
            args.save(mesh, out, state, step=step + 1, steps=args.steps, loss=loss, grad_norm=norm)

    held_out_batches = (len(held_out) - 1) // (args.context * args.batch)  # at least one
    n = min(50, held_out_batches)
    losses = [float(eval_step(state["params"], eval_batch(held_out_batches // n * i)))
              for i in args.until_told(mesh, range(n))]  # fmt: skip
    val: float = sum(losses) / n
    took = f"{args.steps} steps, {time.time() - start:.0f} s"
    say(f"validation loss {val:.3f} nats per byte ({val / np.log(2):.2f} bits) after {took}")
    if args.sample:
        say(f"--- {args.sample} bytes, written by the model")
        one_token = replace(layout, sequence=False, varied=False)  # one token has no sequence to split
        apply: Any = partial(model.apply, cfg, layout=one_token, specs=specs)
        if layout.stage:
            apply = staged(layout=one_token, microbatches=1).logits
        write = sampler(apply, cfg.vocab_size, state["params"], specs, args.context, mesh)
        say(write(args.prompt, args.until_told(mesh, range(args.sample)), fs.fold_in(key, "sample")), markup=False)
    return val


def with_second_moments(state: Any, mesh: fs.Mesh, *, steps: int = 0) -> Any:
    """Return the state, `steps` steps later, for `verify`: with second moments of at least 1/N.

    AdamW divides by the root of the second moment v. If v is only rounding^2, as at the first step for a gradient that
    is exactly 0 (a key's bias), AdamW divides rounding by rounding: the step is anything between -lr and lr,
    and two correct meshes differ by up to 2 lr. With v >= s^2 the derivative of the step by a gradient is at most about
    lr / s, so that rounding d moves a parameter by lr d / s. Clipped gradients have a root mean square of at most
    s = 1 / sqrt(N), and rounding of a few eps of it: the step is as exact as the gradient, and every leaf is compared
    as strictly.
    """
    clip, adamw = state["opt"]
    floor = 1 / sum(x.numel() for x in fs.tree.leaves(adamw["v"]))
    raised = fs.shard_map(lambda v: fs.tree.map(lambda x: x.clamp(min=floor), v), mesh=mesh,
                          out_specs=fs.tree.map(lambda x: x.spec, adamw["v"]))(adamw["v"])  # fmt: skip
    count = fs.device_put(fs.device_get(adamw["count"]) + steps, P(), mesh)
    return {**state, "opt": (clip, {**adamw, "v": raised, "count": count})}


def learning_rate(args: command.Options) -> optim.Schedule:
    """Return a linear warmup over the first 5% of the steps, then a cosine down to a hundredth."""
    warm = max(1, args.steps // 20)
    return optim.warmup(optim.cosine(args.lr, max(1, args.steps - warm), end=args.lr / 100), warm, start=args.lr / warm)


def make_optimizer(
    args: command.Options, described: Any, specs: Any, *, zero: tuple[str, ...], weight_decay: float,
    summed: bool = False, scale: fs.LossScale | None = None,
) -> optim.Optimizer:  # fmt: skip
    """Return AdamW with clipping; weight decay only for matrices. Its state is split over the axes `zero`.

    `summed`: the loss sums the gradients over them, as in `classify`; otherwise the optimizer sums them.
    """
    split = fs.fully_shard(specs, described, axis=zero) if zero else specs
    decay = fs.tree.map(lambda leaf: leaf.ndim > 1, described)
    adamw = optim.adamw(learning_rate(args), b2=0.99, weight_decay=weight_decay, mask=decay)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, split), adamw)
    if scale:
        optimizer = scale.guard(optimizer, split)
    return optim.zero(optimizer, specs, split, axis=zero, summed=summed) if zero else optimizer


def architecture(args: Options) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model, its config, and the arguments of its specs but `model`: a GPT-2, or with experts a Mixtral."""
    if not args.experts:
        return gpt2, gpt2.Config(vocab_size=VOCAB, n_positions=args.context, n_embd=args.width, n_layer=args.layers,
                                 n_head=args.heads, embd_pdrop=args.dropout, attn_pdrop=args.dropout,
                                 resid_pdrop=args.dropout), {}  # fmt: skip
    cfg = mixtral.Config(
        VOCAB, args.width, 2 * args.width, args.layers, args.heads, None, num_local_experts=args.experts,
        num_experts_per_tok=min(2, args.experts), output_router_logits=True, router_aux_loss_coef=0.01,
        max_position_embeddings=args.context, attention_dropout=args.dropout,
    )  # fmt: skip
    return mixtral, cfg, {"experts": ("data", "model")}


def sampler(
    apply: Callable[..., Tensor], size: int, params: Any, specs: Any, t: int, mesh: fs.Mesh
) -> Callable[..., str]:  # fmt: skip
    """Return a function (prompt, range, key) -> text: the prompt and bytes drawn at temperature 0.8, on any mesh."""
    rows = mesh.axes["data"]  # every data rank generates the same text

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P()), out_specs=P("data"))
    def next_logits(params: Any, ids: Tensor, position: Tensor) -> Tensor:
        with torch.no_grad():
            logits = apply(params, ids)[:, int(position)]  # [B@data, V@model]
            full: Tensor = fs.all_gather(logits, "model", 1, size=size, to="invariant")
            return full

    def write(prompt: str, numbers: Iterable[int], key: Tensor) -> str:
        text = [FILE, *prompt.encode()]
        for i in numbers:
            window = text[-t:]
            ids = torch.tensor(window + [0] * (t - len(window))).expand(rows, t)
            logits = fs.device_get(next_logits(params, ids, torch.tensor(len(window) - 1)))[0]
            logits[FILE] = -torch.inf
            cumulative = torch.softmax(logits.double() / 0.8, -1).cumsum(-1)
            text.append(int((cumulative < fs.random.uniform(fs.fold_in(key, i), ())).sum().clamp(max=VOCAB - 2)))
        return bytes(text[1:]).decode("utf-8", errors="replace")

    return write


if __name__ == "__main__":
    main()

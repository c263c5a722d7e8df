"""Compiled programs for real ranks: a whole train step of GPT-2, uneven collectives, and the order of transfers."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch

import fshard as fs
from fshard import P, optim
from fshard.models import gpt2

SIZES = {"vocab_size": 61, "n_positions": 8, "n_embd": 12, "n_layer": 1, "n_head": 3}  # 61 and 3 over 2 ranks
PLAIN = gpt2.Config(**SIZES)
DROPS = gpt2.Config(**SIZES, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
ROWS = 4

# name: (config, layout on an axis "ranks", fully sharded, remat)
KINDS = {
    "data": (DROPS, gpt2.Layout("ranks", batch=ROWS), False, False),
    "tensor": (PLAIN, gpt2.Layout(None, "ranks"), False, False),
    "full": (PLAIN, gpt2.Layout("ranks", batch=ROWS), True, True),
    "context": (PLAIN, gpt2.Layout(context="ranks"), False, False),
    "zero": (PLAIN, gpt2.Layout("ranks", batch=ROWS, varied=True), True, False),
}


def train(mesh: fs.Mesh, kind: str, *, compile: bool = False) -> list[Any]:
    """Train with clipping, a schedule, decay of matrices and donated state: the state and loss after each step."""
    cfg, layout, full, remat = KINDS[kind]
    tokens = P(layout.data, layout.context)
    described = gpt2.init(cfg)
    specs = gpt2.specs(cfg, model=layout.model)
    split = fs.fully_shard(specs, described, axis="ranks") if full else specs
    adamw = optim.adamw(optim.warmup(optim.cosine(1e-2, 10), 3, start=1e-3), weight_decay=0.1,
                        mask=fs.tree.map(lambda x: x.ndim > 1, described))  # fmt: skip
    opt = optim.chain(optim.clip_by_global_norm(0.3, split), adamw)
    if layout.varied:
        opt = optim.zero(opt, specs, split, axis="ranks")
    else:
        specs = split
    placed = {"params": specs, "opt": opt.specs(specs), "key": P(), "step": P()}
    like = {"params": described, "opt": opt.init(described), "key": fs.key(3), "step": torch.tensor(0)}
    state = fs.materialize(like, placed, mesh, key=fs.key(0))

    def loss_fn(params: Any, ids: torch.Tensor, targets: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return gpt2.loss(cfg, params, ids, targets, layout=layout, specs=specs, key=key, remat=remat)

    @fs.shard_map(mesh=mesh, in_specs=(placed, tokens, tokens), out_specs=(placed, P()), donate=0, compile=compile)
    def step(state: Any, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        key = fs.fold_in(state["key"], state["step"])
        params = fs.pvary(state["params"], "ranks") if layout.varied else state["params"]
        loss, grads = fs.value_and_grad(loss_fn)(params, ids, targets, key)
        params, own = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": own, "key": state["key"], "step": state["step"] + 1}, loss

    history = []
    for i in range(4):
        ids = torch.randint(cfg.vocab_size, (ROWS, 9), generator=torch.Generator().manual_seed(i))
        # Placed: of a plain tensor's columns the first call takes copies, and later ones views with other strides.
        batch = fs.materialize((ids[:, :-1], ids[:, 1:]), tokens, mesh, key=fs.key(0))
        state, loss = step(state, *batch)
        history.append(fs.device_get((state, loss)))
    return history


def by_backend(backend: str) -> Any:
    """A context in which `torch.compile` has another backend."""
    return mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend))


def by_aot_eager() -> Any:
    """A context without inductor, which runs a C++ compiler: dynamo and autograd trace alike for each backend."""
    return by_backend("aot_eager")


def compiled_and_eager(kind: str) -> Any:
    """Train compiled and eager: (the compiled history, the eager one, (number of graphs, graph breaks))."""
    mesh = fs.make_mesh(ranks=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with by_aot_eager(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = train(mesh, kind, compile=True)
    counters = torch._dynamo.utils.counters
    counted = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return compiled, train(mesh, kind), counted


def uneven(mesh: fs.Mesh, *, compile: bool) -> list[torch.Tensor]:
    """Every collective over two axes, of parts so uneven that inductor may order each rank's program differently."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        sines, cosines = fs.psum(x.sin().sum(0), "model"), fs.psum(y.cos().sum(0), "model")
        twice, thrice = fs.psum((x * 2).sum(0), "model"), fs.psum((y * 3).sum(0), ("data", "model"))
        rows = fs.all_gather(x, "model", size=5)
        largest, least = fs.pmax(x.amax(0), "model"), fs.pmin(y.amin(0), ("model", "data"))
        columns = fs.all_to_all(x, "model", split=1, concat=0, size=5)
        part = fs.psum_scatter(rows.exp().T, ("model", "data"))
        passed = fs.ppermute(x[:1], "model", [(0, 1)])
        taken = torch.tensor([min(1, len(x))] + [0] * (fs.axis_size("model") - 1))
        first = fs.all_to_all_rows(x, "model", taken, most=2)  # each rank's first row, on rank 0
        outs = (sines + cosines, twice, thrice, rows.sum(0), largest, least, columns.sum(0), part, passed.sum(0))
        outs += (first.exp().sum(0),)
        return tuple(fs.all_gather(out.flatten()[None], ("data", "model"), size=mesh.size) for out in outs)

    step = fs.shard_map(f, mesh=mesh, in_specs=(P("model"), P("model")), out_specs=P(), compile=compile, check="never")
    out = step(torch.arange(20.0).view(5, 4) / 7, torch.arange(16.0).view(4, 4) / 5)
    return [fs.device_get(x) for x in out]


def uneven_compiled(backend: str, axes: dict[str, int]) -> list[torch.Tensor]:
    with by_backend(backend):
        return uneven(fs.make_mesh(**axes), compile=True)


def meshes_made_again() -> list[list[float]]:
    """Results on several meshes of the same ranks, one after the other; a recompilation would raise."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return fs.psum(x * 2, "m")

    found = []
    with by_aot_eager(), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            mesh = fs.make_mesh(m=2)
            step = fs.shard_map(f, mesh=mesh, in_specs=P("m"), out_specs=P(), compile=True, check="never")
            found.append(fs.device_get(step(torch.arange(6.0))).tolist())
    return found

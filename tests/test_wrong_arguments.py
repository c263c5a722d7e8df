"""Calls of every public function with one argument of a wrong kind: the error names the function and the argument.

CALLS has a correct call of each function. A wrong call is one of them with one argument replaced, by a value of another
kind (a str for a mesh, a list for a function) or by one that no argument can have (an unknown axis, NaN, an empty
string). The draws are seeded, so that a failure can be repeated.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fshard as fs
from fshard import P
from fshard.nn import rope
from fshard.planning import Memory, Operation, Plan, roofline
from tests.lib.signals import default_signals

MESH = fs.make_mesh(kind="simulated", data=2, model=2)
KEY = fs.key(0)
W = torch.arange(16.0).reshape(4, 4)
V = torch.arange(4.0)
IDS = torch.tensor([0, 1, 2, 3])
IMAGES = torch.rand(2, 4, 3, 3)
PLACED = fs.device_put(W, P("data"), MESH)
TREE = {"w": W, "b": V}
SPECS = {"w": P(None, "model"), "b": P()}
DESCRIBED = {"w": fs.init.zeros((4, 4)), "b": fs.init.ones(4)}
SGD = fs.optim.sgd(0.1)
LORA = fs.lora.Config(["w"], rank=1, dropout=0.5)
ADAPTERS = {"w": {"a": torch.ones(4, 1), "b": torch.ones(1, 4)}}
BOX = (slice(0, 2), slice(0, 4))
PRODUCT = Operation("aten.mm", "matmul", torch.float32, 8, 8, 8, None, "forward")
PLAN = Plan({"data": 2}, 0, (PRODUCT,), Memory(8, 0, None, {"other": 8}, 0), (), {}, fs.devices.H100,
            roofline([PRODUCT], {"data": 2}, fs.devices.H100))  # fmt: skip


def loss(p: Any, x: Any) -> Any:
    return ((x @ p["w"] + p["b"]) ** 2).mean()


def update_loss(p: Any, x: Any) -> Any:
    return (fs.nn.linear(x, p["w"], p["b"]) ** 2).mean()


def block(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def double(x: Any) -> Any:
    return 2 * x


def planned_step(data: int) -> Any:
    mesh = fs.make_mesh(kind="abstract", data=data)
    return fs.shard_map(double, mesh=mesh, in_specs=(P("data"),), out_specs=P("data")), (fs.init.zeros((4,)),)


STEP = fs.shard_map(double, mesh=MESH, in_specs=(P("data"),), out_specs=P("data"), check="never")


def next_logits(ids: Any, mask: Any, cache: Any) -> Any:
    """Return logits of the next of 12 tokens, and a cache."""
    return torch.eye(12)[ids[:, -1]], cache


class Language(torch.nn.Module):
    """A language model of 12 tokens, with the arguments and results of transformers'."""

    config = SimpleNamespace(is_encoder_decoder=False)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return SimpleNamespace(logits=torch.eye(12)[input_ids])


# The spec of a leaf; the directory of a path or a step; a size, shown in the shape that it makes.
_PARTS = {
    "params": "parameters",
    "path": "is not a checkpoint",
    "specs": r"\bspec\b",
    "step": r"\bstep_\d+",
    "m": "is not a shape",
    "n": "is not a shape",
}


@dataclass(frozen=True)
class Call:
    """A correct call: a function, its arguments by name, and whether it is made inside a region.

    `words`: other names, besides the parameter's own, by which an error may name an argument.
    """

    name: str
    f: Callable[..., Any]
    args: dict[str, Any]
    inside: bool = False
    words: dict[str, str] = field(default_factory=dict)

    def words_for(self, argument: str) -> str:
        """Return a pattern of the names by which an error may call an argument: its own, or a part of it."""
        others = [words[argument] for words in (self.words, _PARTS) if argument in words]
        return "|".join([rf"\b{argument.strip('_')}\b", *others])

    def run(self, **changed: Any) -> Any:
        args = {**self.args, **changed}
        if not self.inside:
            return self.f(**args)

        def region() -> None:
            self.f(**args)

        return fs.shard_map(region, mesh=MESH, out_specs=P(), check="never")()


def inside(f: Callable[..., Any], /, **args: Any) -> Call:
    return Call(f.__name__, f, args, inside=True)


def outside(f: Callable[..., Any], /, **args: Any) -> Call:
    return Call(f.__name__, f, args)


def _by_position(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with its arguments `f` and `x` passed by position: those of a mapped function have no name."""
    return lambda **args: f(*[args.pop(name) for name in ("f", "x") if name in args], **args)


def prefixed(prefix: str, *calls: Call) -> list[Call]:
    return [Call(f"{prefix}.{c.name}", c.f, c.args, c.inside, c.words) for c in calls]


_BY_POSITION = {"p": r"args\[0\]|argument 0", "x": r"args\[1\]"}
_AXES_OF_SPECS = {"specs": "no mesh axis is bound"}  # specs without axes need no region
_OF_LEAVES = {"params": r"params|\bmodule\b", "adapters": "adapters", "of": r"\bof\b", "data": "axis", "model": "axis"}
_OF_MARGINS = {"axis": "4 over ", "cosines": "logits|of the vocabulary"}
_shape = {"shape": (4, 4)}
_kaiming = {"mode": "fan_in", "nonlinearity": "relu", "in_dim": -2, "out_dim": -1, "dtype": torch.float32, "a": 0.0}
_xavier = {"gain": 1.0, "in_dim": -2, "out_dim": -1, "dtype": torch.float32}

CALLS = [
    # spec, mesh
    Call("P", lambda entry, memory, lengths: P(entry, memory=memory, lengths=lengths),
         {"entry": "data", "memory": "device", "lengths": (3, 1)},
         words={"entry": "^P: .* names no axis|the spec names 0"}),
    outside(fs.row, axis="data"),
    outside(fs.column, axis="data"),
    outside(fs.on_host, specs=SPECS),
    outside(fs.rules, table={"**": P()}),
    outside(fs.partition, tree_=TREE, rules=["w"]),
    Call("combine", lambda trees, partial: fs.combine(trees, {"w": W, "b": None}, partial=partial),
         {"trees": {"w": None, "b": V}, "partial": False}, words={"trees": "trees"}),
    Call("rules()", lambda table, tree: fs.rules(table)(tree), {"table": {"w": P(), "b": P()}, "tree": TREE},
         words={"table": r"\brule\b", "tree": r"\bleaf\b"}),
    outside(fs.fully_shard, specs=SPECS, tree=TREE, axis="data", min_size=0),
    outside(fs.make_mesh, kind="simulated", device="cpu", data=2),
    outside(fs.Mesh, axes={"data": 2}, kind="simulated", device=torch.device("cpu")),
    outside(fs.Sharded, shape=(4,), spec=P("data"), mesh=fs.make_mesh(data=2), shards=[V[:2], V[2:]]),
    # placed leaves
    outside(fs.materialize, tree_=DESCRIBED, specs=SPECS, mesh=MESH, key=KEY, dtype=torch.float32),
    outside(fs.device_put, tree_=TREE, specs=SPECS, mesh=MESH),
    outside(fs.from_callback, shape=(4, 4), spec=P("data"), mesh=MESH, fn=lambda box: W[box].clone()),
    outside(fs.device_get, tree_=PLACED, rank=0),
    outside(fs.reshard, tree_=PLACED, specs=P("model"), mesh=MESH),
    outside(fs.shard_map, f=double, mesh=MESH, in_specs=(P(),), out_specs=P(), check="first", compile=False, donate=0),
    Call("step", _by_position(STEP), {"x": V}, words={"x": r"args\[0\]"}),
    Call("step.on", lambda mesh, check: STEP.on(mesh, check=check), {"mesh": MESH, "check": "never"}),
    Call("verify", _by_position(fs.verify),
         {"f": STEP, "x": V, "rtol": 1.0, "atol": 1.0, "bitwise": False}, words={"x": r"args\[0\]|result of double"}),
    outside(fs.show, tree=DESCRIBED, mesh=MESH, specs=SPECS, fold=True),
    outside(fs.show, tree=P("data"), shape=(4, 2), mesh=MESH),
    outside(fs.validate, tree_=TREE, described=DESCRIBED, allow_inf="*"),
    outside(fs.cast, x=TREE, dtype=torch.float16),
    outside(fs.Policy, param=torch.float32, compute=torch.float16, output=torch.float32, reduce=torch.float32),
    outside(fs.LossScale, initial=8.0, growth=2.0, backoff=0.5, interval=10, floor=1.0),
    outside(fs.defer, constructor=lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), units="0",
            replace={"0": fs.nn.column_linear("model")}, budget=100, reference=None),
    # scripts
    Call("main_first", lambda **args: fs.main_first(**args).__enter__(), {"mesh": MESH, "local": False}),
    outside(fs.wait, mesh=MESH),
    Call("preempted", default_signals()(fs.preempted), {"mesh": MESH}),
    outside(fs.gather_for_metrics, results={"w": PLACED}, counted=V > 1, rank=None),
    # collectives
    inside(fs.psum, x=TREE, axis="data"),
    inside(fs.pmean, x=TREE, axis="data"),
    inside(fs.pvary, x=TREE, axis="data"),
    inside(fs.pmax, x=TREE, axis="data", grad=None),
    inside(fs.pmin, x=TREE, axis="data", grad="tied"),
    inside(fs.all_gather, x=W, axis="data", dim=0, size=None, to="varying"),
    inside(fs.psum_scatter, x=W, axis="data", dim=0, lengths=None),
    inside(fs.pslice, x=W, axis="data", dim=0, lengths=None),
    inside(fs.all_to_all, x=W, axis="data", split=0, concat=1, size=None),
    inside(fs.all_to_all_rows, x=W, axis="data", send=[1, len(W) - 1], receive=None, most=None),
    inside(fs.take_rows, x=W, axis="data", rows=torch.tensor([0, 1])),
    inside(fs.ppermute, x=W, axis="data", perm=[(0, 1)]),
    inside(fs.axis_index, axis="data"),
    inside(fs.axis_position, axis="data"),
    inside(fs.axis_size, axis="data"),
    inside(fs.global_shape, x=W, spec=P()),
    Call("local_range", fs.local_range, {"n": 2, "axis": "data", "size": 4}, inside=True,
         words={"n": "of the dim", "axis": "4 over ", "size": "over 'data'"}),
    inside(fs.to_device, x=W),
    Call("print", lambda sep: fs.print("w", W, sep=sep), {"sep": " "}, inside=True),
    # transforms
    Call("unshard", fs.unshard, {"params": {"w": W[:, :2], "b": V}, "specs": SPECS, "axis": "model",
         "shapes": DESCRIBED, "dtype": torch.float32, "reduce_dtype": torch.float32}, inside=True,
         words={"params": "not a prefix of the tree"}),
    inside(fs.scan, block=block, params=[TREE], x=W, specs=P(), axis="data", each=None, shapes=None, has_aux=False,
           release=True, remat=False, offload=False, prefetch=1, backward_prefetch="post", dtype=None,
           reduce_dtype=None),
    outside(fs.strategy, name="FULL_SHARD", axis="data", release=True, prefetch=1, backward_prefetch="post",
            offload_params=False, offload_optimizer=True),
    outside(fs.Strategy, name="FULL_SHARD", axis="data", shard=("data",)),
    Call("param_specs", lambda **how: fs.strategy("FULL_SHARD").param_specs(**how), {"tree": TREE, "specs": SPECS}),
    Call("state_specs", lambda **how: fs.strategy("FULL_SHARD").state_specs(**how),
         {"optimizer": SGD, "param_specs": SPECS}, words={"param_specs": r"\bspecs?\b"}),
    Call("value_and_grad", lambda f, argnums, has_aux, p, x: fs.value_and_grad(f, argnums, has_aux=has_aux)(p, x),
         {"f": loss, "argnums": 0, "has_aux": False, "p": TREE, "x": W}, words=_BY_POSITION),
    Call("grad", lambda f, argnums, p, x: fs.grad(f, argnums)(p, x), {"f": loss, "argnums": 0, "p": TREE, "x": W},
         words=_BY_POSITION),
    Call("accumulate", lambda f, p, x, steps, **how: fs.accumulate(f, steps, **how)(p, x),
         {"f": loss, "steps": 2, "argnums": 0, "counted": False, "gather": None, "p": TREE, "x": W},
         words=_BY_POSITION),
    outside(fs.remat, f=block),
    outside(fs.schedule_table, kind="interleaved", n=2, m=4, chunks=2),
    outside(fs.on_stages, specs=[P(), P()], layers=[DESCRIBED, DESCRIBED], axis="stage", n=2, chunks=1),
    Call("pipelined", lambda params, batch, each, **how: fs.pipelined(**how)(params, batch, each=each),
         {"first": block, "stage": lambda p, h, b, e: h * p * e, "last": lambda ends, h, b: (h.sum(), 4),
          "axis": "model", "microbatches": 2, "schedule": "1f1b", "chunks": 1, "gather": None, "counted": True,
          "has_aux": False, "params": (TREE, W), "batch": W, "each": V}, inside=True,
         words={"has_aux": "counted=True"}),
    # random numbers and initializers
    outside(fs.key, n=0),
    outside(fs.fold_in, key=KEY, data="w"),
    outside(fs.split, key=KEY, n=2),
    *prefixed("random",
        outside(fs.random.normal, key=KEY, shape=(4,), spec=P(), mean=0.0, std=1.0, dtype=torch.float32, device=None),
        outside(fs.random.trunc_normal, key=KEY, shape=(4,), spec=P(), mean=0.0, std=1.0, a=-1.0, b=1.0),
        outside(fs.random.uniform, key=KEY, shape=(4,), spec=P(), low=0.0, high=1.0, dtype=torch.float32),
        outside(fs.random.bernoulli, key=KEY, shape=(4,), p=0.5, spec=P(), device=None),
        outside(fs.random.randint, key=KEY, shape=(4,), low=0, high=2, spec=P(), device=None),
        outside(fs.random.bits, key=KEY, shape=(4,), spec=P(), device=None),
        outside(fs.random.exponential, key=KEY, shape=(4,), spec=P(), dtype=torch.float32, device=None),
        outside(fs.random.gumbel, key=KEY, shape=(4,), spec=P(), dtype=torch.float32, device=None),
        outside(fs.random.categorical, key=KEY, logits=W, dim=-1, spec=P(), shape=None),
        outside(fs.random.permutation, key=KEY, x=4, dim=0),
        outside(fs.random.normal_box, key=KEY, shape=(4, 4), box=BOX, mean=0.0, std=1.0),
        outside(fs.random.bernoulli_box, key=KEY, shape=(4, 4), box=BOX, p=0.5),
        inside(fs.random.normal, key=KEY, shape=(4,), spec=P("data")),
    ),
    *prefixed("init",
        outside(fs.init.normal, **_shape, mean=0.0, std=1.0, dtype=torch.float32),
        outside(fs.init.trunc_normal, **_shape, mean=0.0, std=1.0, a=-2.0, b=2.0, dtype=torch.float32),
        outside(fs.init.uniform, **_shape, low=0.0, high=1.0, dtype=torch.float32),
        outside(fs.init.full, **_shape, value=1.0, dtype=torch.float32),
        outside(fs.init.zeros, **_shape, dtype=torch.float32),
        outside(fs.init.ones, **_shape, dtype=torch.float32),
        outside(fs.init.eye, n=4, m=4, gain=1.0, dtype=torch.float32),
        outside(fs.init.arange, n=4, start=0, step=1, dtype=torch.float32),
        outside(fs.init.orthogonal, **_shape, gain=1.0, dtype=torch.float32),
        outside(fs.init.zero_row, leaf=fs.init.zeros((4, 4)), row=0),
        outside(fs.init.stacked, layer={"w": fs.init.zeros((4, 4))}, n=3),
        outside(fs.init.fans, **_shape, in_dim=-2, out_dim=-1),
        outside(fs.init.kaiming_uniform, **_shape, **_kaiming),
        outside(fs.init.kaiming_normal, **_shape, **_kaiming),
        outside(fs.init.xavier_uniform, **_shape, **_xavier),
        outside(fs.init.xavier_normal, **_shape, **_xavier),
        outside(fs.Deferred, shape=(4,), dtype=torch.float32, init=fs.init.Full(0.0), scope=None),
    ),
    # layers
    *prefixed("nn",
        outside(fs.nn.linear, x=W, w=W, b=V),
        inside(fs.nn.linear, x=W, w=W, b=V, axis="model", split="column", out="whole", size=8),
        inside(fs.nn.linear, x=W, w=W, b=V, axis="model", split="row", out=None, size=None),
        outside(fs.nn.mlp, x=W, up=W, down=W, up_b=V, down_b=V, activation=torch.relu, axis=None),
        inside(fs.nn.mlp, x=W, up=W, down=W, up_b=V, down_b=V, activation=torch.relu, axis="model"),
        outside(fs.nn.embedding, ids=IDS, table=W, axis=None, size=4),
        Call("embedding", fs.nn.embedding, {"ids": IDS % 2, "table": W[:2], "axis": "model", "size": 4}, inside=True,
             words={"table": "of the vocabulary"}),
        inside(fs.nn.embedding, ids=IDS, table=W, axis="model", size=8, split="column", out="whole", padding_idx=1,
               max_norm=None),
        outside(fs.nn.column_linear, axis="model", out="split"),
        outside(fs.nn.row_linear, axis="model", input="split"),
        outside(fs.nn.row_embedding, axis=("data", "model")),
        outside(fs.nn.column_embedding, axis="model", out="whole"),
        outside(fs.nn.Replacement, name="mine", takes=(torch.nn.Linear,), specs=lambda of: {}, forward=block),
        outside(fs.nn.route, logits=W, k=2, score="sigmoid", bias=V, groups=(2, 1), renormalize=False),
        inside(fs.nn.balance, routing=fs.nn.route(W, 1), over="data", counted=V),
        outside(fs.nn.grouped_linear, x=W, w=W[None], counts=[4]),
        Call("mixture", fs.nn.mixture,
             {"x": W, "routing": fs.nn.route(W, 1), "params": torch.ones(2, 4, 3), "axis": "model",
              "run": lambda w, x, counts: fs.nn.grouped_linear(x, w, counts), "method": "partial"},
             inside=True, words={"params": r"\bparams\b|\bw\b"}),
        outside(fs.nn.cosine_logits, x=W, w=W, eps=1e-12),
        Call("margin", fs.nn.margin, {"cosines": W[:, :2], "targets": IDS, "m1": 1.0, "m2": 0.5, "m3": 0.1,
             "scale": 64.0, "axis": "model", "size": 4}, inside=True, words=_OF_MARGINS),
        Call("arcface", fs.nn.arcface, {"cosines": W, "targets": IDS, "m": 0.5, "scale": 64.0, "easy_margin": False,
             "classes": IDS}, words=_OF_MARGINS),
        Call("cosface", fs.nn.cosface, {"cosines": W, "targets": IDS, "m": 0.35, "scale": 64.0, "classes": IDS},
             words=_OF_MARGINS),
        Call("sample_classes", fs.nn.sample_classes, {"key": KEY, "targets": IDS, "size": 8, "count": 4,
             "axis": "model", "over": "data"}, inside=True, words={"axis": "no axis", "over": "no axis"}),
        outside(fs.nn.layer_norm, x=W, w=V, b=V, eps=1e-5),
        outside(fs.nn.rms_norm, x=W, w=V, eps=1e-5),
        outside(fs.nn.attention, q=W[None], k=W[None], v=W[None], causal=False, mask=None, scale=1.0, rate=0.1, key=KEY,
                spec=P(), shape=(1, 4, 4)),
        outside(fs.nn.attention_lse, q=W[None, None], k=W[None, None], v=W[None, None], causal=False, mask=None,
                scale=1.0),
        inside(fs.nn.context_attention, q=W[None, None], k=W[None, None], v=W[None, None], axis="data", method="ring",
               order="contiguous", causal=True, mask=torch.ones(1, 4), documents=torch.zeros(1, 4), window=2,
               scale=1.0, size=8, rate=0.5, key=KEY, spec=P(), shape=(1, 1, 8, 8)),
        *(Call(f.__name__, f, {"x": W, "axis": "data", "dim": 1, "size": 8}, inside=True,
               words={"x": "this rank has 2"})
          for f in (fs.nn.to_zigzag, fs.nn.from_zigzag)),
        inside(fs.nn.zigzag_positions, size=8, axis="data"),
        outside(fs.nn.causal_mask, t=2, s=4, device=None),
        Call("dropout", fs.nn.dropout, {"x": W, "rate": 0.5, "key": KEY, "spec": P("data"), "shape": (8, 4),
             "zigzag": "data"}, inside=True,
             words={"spec": r"^P\(", "shape": "the leaf has 0", "zigzag": "the mesh has no axis"}),
        outside(fs.nn.gelu, x=W),
        outside(fs.nn.conv2d, x=IMAGES, w=W[:, :, None, None], b=V, stride=1, padding="same", dilation=1, groups=1),
        outside(fs.nn.max_pool2d, x=IMAGES, kernel=2, stride=(1, 2), padding=1, dilation=1, ceil_mode=False),
        outside(fs.nn.avg_pool2d, x=IMAGES, kernel=2, stride=(1, 2), padding=1, ceil_mode=False,
                count_include_pad=True),
        Call("batch_norm", fs.nn.batch_norm, {"x": IMAGES, "state": {"mean": V, "var": V, "count": torch.tensor(0)},
             "w": V, "b": V, "train": True, "momentum": 0.1, "eps": 1e-5, "over": None},
             inside=True, words={"over": "no axis"}),
        Call("cross_entropy", fs.nn.cross_entropy, {"logits": W[:, :2], "targets": IDS, "axis": "model", "size": 4,
             "over": None, "weight": V[:2], "ignore_index": -100, "label_smoothing": 0.1, "reduction": "mean",
             "classes": None},
             inside=True, words={"axis": "4 over |of 2 classes", "over": "no axis"}),
        Call("top_k", fs.nn.top_k, {"logits": W[:, :2], "k": 3, "axis": "model", "size": 4, "classes": None},
             inside=True, words={"axis": "4 over ", "logits": "of the vocabulary"}),
        Call("accuracy", fs.nn.accuracy, {"logits": W[:, :2], "targets": IDS, "k": (1, 3), "axis": "model", "size": 4,
             "over": None, "ignore_index": -100}, inside=True,
             words={"axis": "4 over |of 2 classes", "over": "no axis"}),
        outside(rope.parameters, config={}, theta=10_000.0, partial=1.0),
        outside(rope.frequencies, parameters={"rope_theta": 1e4}, width=4, longest=8, length=None, device=None),
        outside(rope.angles, positions=IDS, rates=V, factor=1.0, dtype=torch.float32),
        outside(rope.rotate, x=W[None, None], cos=V[None, None, :, None], sin=V[None, None, :, None], style="half"),
    ),
    # optimizers
    *prefixed("lora",
        Call("quantize", fs.lora.quantize, {"params": {"w": W, "b": V}, "targets": ["w"], "exclude": (), "of": None},
             words={"params": "no module is named", "of": r"no module|path"}),
        outside(fs.lora.dequantize, params=fs.lora.quantize(TREE), dtype=torch.float32),
        Call("part_specs", fs.lora.part_specs, {"params": TREE, "specs": SPECS},
             words={"params": "not a prefix of the tree"}),
    ),
    *prefixed("optim",
        outside(fs.optim.sgd, lr=0.1, momentum=0.9, nesterov=True, dampening=0.0, weight_decay=0.0, mask=None),
        outside(fs.optim.adamw, lr=0.1, b1=0.9, b2=0.9, eps=1e-8, weight_decay=0.1, mask={"w": True, "b": False}),
        outside(fs.optim.adam, lr=0.1, b1=0.9, b2=0.9, eps=1e-8),
        outside(fs.optim.nadam, lr=0.1, b1=0.9, b2=0.9, eps=1e-8, momentum_decay=0.1),
        outside(fs.optim.lion, lr=0.1, b1=0.9, b2=0.9, weight_decay=0.1, mask=None),
        outside(fs.optim.adagrad, lr=0.1, eps=1e-8),
        outside(fs.optim.rmsprop, lr=0.1, alpha=0.9, eps=1e-8, momentum=0.9),
        outside(fs.optim.schedule_free, lr=0.1, warmup=1, b1=0.9, b2=0.9, eps=1e-8, weight_decay=0.1, mask=None),
        outside(fs.optim.adafactor, lr=0.1, specs=SPECS, decay=0.8, clip=1.0, min_scale=0.1, weight_decay=0.1,
                mask=None),
        outside(fs.optim.muon, lr=0.1, specs=SPECS, momentum=0.9, weight_decay=0.1, mask=None),
        outside(fs.optim.from_formula, name="mine", moments=["m"], formula=lambda p, g, m, lr, count: (p, m), lr=0.1,
                specs=SPECS, mask=None),
        Call("chain", lambda step: fs.optim.chain(step, SGD), {"step": fs.optim.clip_by_global_norm(1.0, P())}),
        outside(fs.optim.clip_by_global_norm, max_norm=1.0, specs=SPECS),
        outside(fs.optim.update_rows, opt=SGD, rows=IDS[:2], grads={"w": W[:2], "b": V[:2]}, state=SGD.init(TREE),
                params=TREE),
        Call("zero", fs.optim.zero, {"optimizer": SGD, "specs": SPECS, "split": {"w": P("data", "model"), "b": P()},
             "axis": "data", "summed": False}, words={"split": "not a prefix of the tree"}),
        Call("global_norm", fs.optim.global_norm, {"x": TREE, "specs": P()}, words=_AXES_OF_SPECS),
        outside(fs.optim.constant, value=0.1),
        outside(fs.optim.linear, start=0.0, end=1.0, steps=4),
        outside(fs.optim.cosine, peak=1.0, steps=4, end=0.0),
        outside(fs.optim.warmup, after=1.0, steps=4, start=0.0),
        Call("schedule", fs.optim.cosine(1.0, 4), {"count": 1}),
        Call("init", SGD.init, {"params": TREE}),
        Call("update", SGD.update, {"grads": TREE, "state": SGD.init(TREE), "params": TREE}),
        Call("specs", SGD.specs, {"param_specs": SPECS}),
        Call("mask", lambda mask: fs.optim.sgd(0.1, mask=mask).update(TREE, SGD.init(TREE), TREE), {"mask": None}),
    ),
    Call("value_and_update", lambda f, opt, in_backward, has_aux: fs.value_and_update(
        f, opt, in_backward=in_backward, has_aux=has_aux)(TREE, SGD.init(TREE), W),
        {"f": update_loss, "opt": SGD, "in_backward": ["w"], "has_aux": False}),
    Call("stepped", fs.value_and_update(update_loss, SGD, in_backward="w"),
         {"params": TREE, "state": SGD.init(TREE), "x": W}),
    Call("scale.guard", fs.LossScale().guard, {"optimizer": SGD, "specs": P()}),
    Call("scale.scale", fs.LossScale().scale, {"loss": V[0], "state": fs.LossScale().init()}),
    Call("scale.unscale", fs.LossScale().unscale, {"grads": TREE, "state": fs.LossScale().init(), "specs": P()},
         words=_AXES_OF_SPECS),
    Call("scale.adjust", fs.LossScale().adjust, {"state": fs.LossScale().init(), "finite": torch.tensor(True)}),
    Call("policy.to_compute", lambda compute, x: fs.Policy(compute=compute).to_compute(x),
         {"compute": torch.float32, "x": TREE}),
    # generation
    *prefixed("decoding",
              outside(fs.decoding.Options, eos=(2, 3), pad=0, stop=[[1, 2]], min_new=0, temperature=1.0, top_k=3,
                      top_p=0.5, min_p=0.1, typical_p=0.9, repetition_penalty=1.5, no_repeat_ngram=2, forced_bos=1,
                      forced_eos=2),
              outside(fs.decoding.Options, eos=2, beams=2, length_penalty=1.0, early_stopping="never"),
              inside(fs.decoding.generate, decoder=fs.decoding.Decoder(next_logits, next_logits, None), ids=IDS[None],
                     new=2, options=fs.decoding.Options(), size=12, data="data", model=None, mask=None, key=KEY,
                     on_token=None)),
    Call("hf.generate", lambda apply, **args: fs.hf.generate(apply, {}, {}, **args),
         {"apply": lambda p, b, **inputs: Language()(**inputs), "module": Language(), "ids": IDS[None], "new": 2,
          "data": "data", "mask": None, "key": KEY, "on_token": None, "top_k": 3, "temperature": 1.0}, inside=True),
    Call("hf.generation_options", fs.hf.generation_options, {"source": {"eos_token_id": 2}},
         words={"source": r"config\.json|^generation_options: w=1 is not an option"}),
    # adapters
    *prefixed("lora",
        outside(fs.lora.Config, targets=["w"], rank=2, alpha=4.0, dropout=0.1, rslora=True, dora=True, bias="all",
                modules_to_save=["b"], ranks={"w": 3}, alphas={"w": 2.0}, exclude=["b"], init="gaussian"),
        Call("init", fs.lora.init, {"cfg": LORA, "params": DESCRIBED, "of": None, "key": KEY}, words=_OF_LEAVES),
        Call("specs", fs.lora.specs, {"cfg": LORA, "params": DESCRIBED, "specs": SPECS, "of": None}, words=_OF_LEAVES),
        Call("apply", fs.lora.apply, {"cfg": LORA, "params": TREE, "adapters": ADAPTERS, "of": None, "specs": P(),
             "adapter_specs": P(), "data": None, "model": None, "key": KEY, "shapes": DESCRIBED, "batch": 4,
             "weight": 1.0}, words=_OF_LEAVES),
        Call("merge", fs.lora.merge, {"cfg": LORA, "params": TREE, "adapters": ADAPTERS, "of": None, "safe": True,
             "weight": 1.0}, words=_OF_LEAVES),
        Call("unmerge", fs.lora.unmerge, {"cfg": LORA, "params": TREE, "adapters": ADAPTERS, "of": None,
             "weight": 1.0}, words=_OF_LEAVES),
    ),
    # devices and plans
    *prefixed("devices",
        outside(fs.devices.of, name="h100"),
        outside(fs.devices.fitted, device=fs.devices.H100),
        outside(fs.devices.calibrated, plan=PLAN, seconds=PLAN.time.seconds),  # type: ignore[union-attr]
        outside(fs.devices.measure, mesh=None, seconds=0.01),
        outside(fs.devices.this_cpu, seconds=0.01),
        outside(fs.devices.with_bus_bandwidth, device=fs.devices.H100, measured={16: 3e11}),
        outside(fs.devices.Device, name="own", flops={torch.float32: 1e12}, memory=2**30, bandwidth=1e11,
                links=(fs.devices.Link("Ethernet", None, 1e9, 1e-5),), efficiency=0.5),
    ),
    Call("trace", _by_position(fs.trace),
         {"f": STEP, "x": V, "path": None, "device": None}, words={"x": r"args\[0\]"}),
    *prefixed("plot",
        outside(fs.plot.memory, run=PLAN), outside(fs.plot.roofline, plan=PLAN), outside(fs.plot.traffic, plan=PLAN),
    ),
    outside(fs.plan_table, step_of=planned_step, layouts=[{"data": 2}], device=fs.devices.H100, tokens=4, headroom=0.5,
            progress=False),
    *prefixed("planning",
        outside(fs.planning.search, step_of=planned_step, layouts=[{"data": 2}], device=fs.devices.H100, tokens=4,
                headroom=0.5, best=1, blocks=None, heavier=None, slower=None, least=None, work=None, neighbours=None,
                progress=False),
        outside(fs.planning.divisions, n=8, data=8, model=2),
    ),
    # data and checkpoints
    *prefixed("data",
        outside(fs.data.permute, key=KEY, positions=IDS, size=4),
        outside(fs.data.steps_per_epoch, size=8, batch=2, drop_last=True),
        outside(fs.data.indices, key=KEY, step=0, size=8, batch=2, epoch=0, drop_last=True, even=False),
        outside(fs.data.counted, step=0, size=8, batch=2),
        outside(fs.data.buckets, lengths=[1, 2, 3], boundaries=[2, 4], batch=2),
        Call("Buckets.indices", fs.data.buckets([1, 2, 3], [2, 4], batch=2).indices,
             {"key": KEY, "step": 0, "epoch": 0, "drop_last": False, "even": False}),
        outside(fs.data.pad, rows=[[1, 2], [3]], length=2, value=0, side="left"),
        outside(fs.data.load, fetch=lambda i: W[torch.from_numpy(i)], indices=IDS, mesh=MESH, spec=P("data")),
        outside(fs.data.crop, text=torch.arange(10), starts=[0, 1], length=2),
        outside(fs.data.sampler, key=KEY, size=8, batch=2, mesh=MESH, axis="data", step=0, epoch=0, drop_last=True,
                even=False, with_epoch=True),
        outside(fs.data.batches, loader=DataLoader(IDS, batch_sampler=fs.data.sampler(KEY, 4, 2, MESH)),
                spec=P("data")),
    ),
]  # fmt: skip


def checkpoint_calls(folder: Path) -> list[Call]:
    """Return calls that write to and read from a folder, and those of fs.accelerate."""
    fs.checkpoint.save(folder / "saved", TREE, step=1)
    fs.checkpoint.save(folder / "one", TREE)
    (folder / "fsdp.json").write_text('{"distributed_type": "FSDP", "num_processes": 2}')
    settings = fs.accelerate.Settings(wrap="_no_split_modules")
    model = type("Model", (), {"_no_split_modules": ["Block"]})
    accelerate = prefixed("interop.accelerate",
        Call("read", fs.accelerate.read, {"path": folder / "fsdp.json", "num_processes": 4}, words={"path": "be read"}),
        Call("settings.units", settings.units, {"model": model}),
        outside(fs.accelerate.Settings, strategy="FULL_SHARD", processes=2, machines=2, wrap=("Block",), offload=True,
                compute=torch.bfloat16, accumulate=2, backward_prefetch="pre", state_dict="full", reshard=2),
    )  # fmt: skip
    (folder / "photos" / "cat").mkdir(parents=True)
    (folder / "photos" / "cat" / "1.png").touch()
    torch.save({"w": W, "b": V}, folder / "w.pt")
    files = prefixed("interop.state_dict",
        outside(fs.state_dict.gather, tree_=TREE, of=None),
        outside(fs.state_dict.write, path=folder / "again.safetensors", tree_=TREE, of=None, theirs=None,
                metadata={"a": "b"}),
        Call("read", fs.state_dict.read, {"path": folder / "w.pt", "described": DESCRIBED, "of": None, "theirs": None,
             "prefix": "", "ignored": (), "missing": ()},
             words={"path": "be read", "described": "is not part of this model"}),
    )  # fmt: skip
    images = Call("image_folder", fs.data.image_folder, {"path": folder / "photos", "size": (2, 2), "mode": "L"},
                  words={"path": "is not a folder|classes in"})  # fmt: skip
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 2.5}\n')
    losses = Call("losses", fs.plot.losses, {"path": folder, "window": 2}, words={"path": "losses: "})
    return accelerate + files + prefixed("data", images) + prefixed("plot", losses) + prefixed("checkpoint",
        outside(fs.checkpoint.save, path=folder / "again", tree_=TREE, step=1, keep=1, overwrite=True,
                base=None, background=True),
        outside(fs.checkpoint.restore, path=folder / "saved", like=DESCRIBED, specs=P(), mesh=MESH, step=1, at="",
                base=None),
        outside(fs.checkpoint.digest, tree_=TREE),
        outside(fs.checkpoint.inspect, path=folder / "saved", step=1),
        outside(fs.checkpoint.steps, path=folder / "saved"),
        outside(fs.checkpoint.latest, path=folder / "saved"),
        outside(fs.checkpoint.wait),
    )  # fmt: skip


def peft_calls(folder: Path) -> list[Call]:
    """Return calls that write adapters to a folder and read them."""
    cfg = fs.lora.Config(("w",), rank=2)
    adapters = {"w": {"a": W[:, :2], "b": W[:2]}}
    fs.peft.save(folder / "adapters", cfg, adapters, DESCRIBED)
    words = {"params": "no module is named", "adapters": "tree", "folder": r"adapter_config\.json"}
    load = {"folder": folder / "adapters", "params": DESCRIBED, "of": None, "prefix": "", "ignored": ()}
    save = {"path": folder / "again", "cfg": cfg, "adapters": adapters, "params": DESCRIBED, "of": None, "prefix": "",
            "like": folder / "adapters", "config": {"task_type": "CAUSAL_LM"}}  # fmt: skip
    ia3 = fs.ia3.Config(("w",))
    scaled = {"cfg": ia3, "params": TREE, "of": None}
    return [
        Call("peft.load", fs.peft.load, load, words=words), Call("peft.save", fs.peft.save, save, words=words),
        Call("ia3.Config", fs.ia3.Config, {"targets": ("w",), "feedforward": (), "modules_to_save": (), "exclude": ()}),
        Call("ia3.init", fs.ia3.init, {**scaled, "key": KEY}, words=words),
        Call("ia3.specs", fs.ia3.specs, {**scaled, "specs": SPECS}, words=words),
        Call("ia3.apply", fs.ia3.apply, {**scaled, "adapters": {"w": {"scale": V}}, "specs": SPECS, "model": None},
             words=words),
    ]  # fmt: skip


class Thing:
    """An object that no function knows."""


WRONG: dict[str, Any] = {
    "None": None, "True": True, "7": 7, "-1": -1, "-9": -9, "0": 0, "2.5": 2.5, "nan": float("nan"), "''": "",
    "'no_such'": "no_such", "[]": [], "['a']": ["a"], "()": (), "(None,)": (None,), "{}": {}, "{'w': 1}": {"w": 1},
    "P()": P(), "P('data')": P("data"), "P('no_such')": P("no_such"), "P(a, b, c)": P("data", None, "model"),
    "mesh": MESH, "other mesh": fs.make_mesh(kind="simulated", other=2), "class": Thing, "lambda": lambda: None,
    "thing": Thing(), "dtype": torch.int8,
    "tensor[]": torch.tensor(1.0), "tensor[3]": torch.zeros(3), "int64[2, 2]": torch.zeros(2, 2, dtype=torch.int64),
    "placed": PLACED, "deferred": DESCRIBED["w"], "b''": b"", "1j": 1j, "slice": slice(0, 1), "...": ...,
}  # fmt: skip


def wrong_calls(calls: list[Call]) -> list[tuple[Call, str, str]]:
    """Return every pair of an argument of a call and a wrong value for it."""
    return [(call, argument, kind) for call in calls for argument in call.args for kind in WRONG]


def outcome(call: Call, argument: str, kind: str) -> tuple[str, str]:
    """Make a wrong call. Return its outcome and the text of its error.

    "accepted": no error. "named": the error names the argument. "users": it is of a function that was passed, or of its
    call with other arguments than it takes. "torch": torch's own error about a tensor of another shape or dtype, in
    place of an argument that may be a tensor. "unnamed": any other.
    """
    try:
        call.run(**{argument: WRONG[kind]})
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        if isinstance(e, fs.ShardingError) and re.search(call.words_for(argument), _read(e, argument)):
            return "named", text
        if _in_users_function(e) or re.match(r"[<>\w.]+\(\) (takes|missing|got) ", str(e)):
            return "users", text
        is_torchs = isinstance(WRONG[kind], torch.Tensor) and isinstance(e, (RuntimeError, IndexError))
        return ("torch" if is_torchs else "unnamed"), text
    return "accepted", ""


def _read(e: Exception, argument: str) -> str:
    """Return the text of an error in which to look for an argument; fixes call every tensor x."""
    return re.sub(r"\n +fix: .*", "", str(e)) if argument == "x" else str(e)


def _in_users_function(e: Exception) -> bool:
    codes = {f.__code__ for f in (loss, block, double)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(e.__traceback__))


def make(picked: list[tuple[Call, str, str]]) -> dict[str, list[str]]:
    """Make wrong calls; return the calls and the texts of their errors by outcome."""
    found: dict[str, list[str]] = {}
    for call, argument, kind in picked:
        result, text = outcome(call, argument, kind)
        found.setdefault(result, []).append(f"{call.name}({argument}={kind}): {text}")
    return found


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Call]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with contextlib.chdir(folder):  # wrong paths are relative to it
        yield CALLS + checkpoint_calls(folder) + peft_calls(folder)


# Without arguments; called by other functions; for initializers of one's own; loads fake tensors for seconds.
NOT_CALLED = (
    "check",
    "plan",
    "recording",
    "replicated",
    "check_key",
    "trunc_normal_box",
    "uniform_box",
    "describe_initializer",
    "settings",
)


def test_every_public_function_has_a_correct_call(calls: list[Call]) -> None:
    called = {call.name.split(".")[-1] for call in calls}
    namespaces = (fs, fs.nn, fs.init, fs.random, fs.optim, fs.checkpoint, fs.accelerate)
    functions = {name for space in namespaces for name in space.__all__ if inspect.isfunction(getattr(space, name))}
    assert functions - called - set(NOT_CALLED) == set()


def test_correct_calls_run(calls: list[Call]) -> None:
    for call in calls:
        call.run()


@pytest.mark.parametrize("n", [640, pytest.param(None, marks=pytest.mark.slow)])
def test_error_of_a_wrong_argument_names_it(calls: list[Call], n: int | None) -> None:
    every = wrong_calls(calls)
    found = make(every if n is None else random.Random(0).sample(every, n))
    assert not found.get("unnamed"), "\n".join(found["unnamed"])
    share = {result: len(texts) / sum(map(len, found.values())) for result, texts in found.items()}
    assert share["named"] > 0.85
    assert share.get("torch", 0) < 0.01


# Arguments whose leaves are passed on as they are, whatever they are.
PASSED_ON = ("cast.x", "policy.to_compute.x", "device_get.tree_", "to_device.x", "step.x", "trace.x",
             "verify.x")  # fmt: skip


@pytest.mark.parametrize("kind", ["thing", "slice", "b''"])
def test_no_function_accepts_what_no_argument_can_be(calls: list[Call], kind: str) -> None:
    accepted = [
        f"{call.name}.{argument}"
        for call in calls
        for argument in call.args
        if f"{call.name}.{argument}" not in PASSED_ON and outcome(call, argument, kind)[0] == "accepted"
    ]
    assert not accepted

"""Random calls of every public function, partly right and partly wrong: each ends, with a result or a clear error.

    python -m tests.faults.calls --runs 10000 --seed 0             # the table, and the unclear calls by place
    python -m tests.faults.calls --seed 0 --only 1234              # one call of them, with its traceback

**Functions**: those of the faces of fshard (their `__all__`), found by introspection, so that a new function is called
too. A function's arguments are those of a correct call of it (`tests.test_wrong_arguments`, and MODELS and others
here); of a function without one, they are made by the names and annotations of its parameters.

**Calls**: of the arguments of a correct call none, one (most often) or two are changed: to a neighbour of the value (a
tensor of another shape, dtype or device, an unknown axis, a spec of more dims, a tree without a leaf, a function of
another arity), or to an object of another kind. The call is made outside of `shard_map` or on one of MESHES, checked
or not, and now and then under `torch.func.grad`, `vmap` or `jvp`.

**Outcomes**. Clear are:

- "returned": a result. Calls of functions without an axis are made twice if nothing is changed, outside and on a
  mesh: a result that differs is unclear ("parity").
- "named": a ShardingError (or a TypeError or ValueError that fshard raises itself) whose text names the function, an
  argument (by its name, a word of `_WORDS`, or the string that was passed, as a path) or a leaf, and has a value: a
  number, a quoted string, a list, a call, or a fix.
- "arity": Python's TypeError of a call without an argument, or with one that the function does not have.
- "users": the last frame of fshard called a function of the caller (`loss`, `block`), where the error is from.
- "transform": an error of torch about a transform of torch.func (no jvp of a kernel, `.item()` under vmap).
- "torch": torch's own RuntimeError, IndexError or ValueError about the tensors of an operation, with a note that names
  the function of fshard and shows its arguments (`errors.checked` adds it); or torch's statement of the bytes that do
  not fit the memory. An AttributeError, KeyError, AssertionError, TypeError and others are never excused by a note.
- "system": an OSError that names the path.

Everything else is unclear, and so are a call of more than 10 s of CPU time and one at which the interpreter ends.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import inspect
import json
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.interop import hf
from tests import test_wrong_arguments as correct
from tests.test_wrong_arguments import Call, _by_position, outside, prefixed

MOST_SECONDS = 10
MEMORY = 16 << 30  # of one process: a size without a check ends in a MemoryError, and not the machine

MESHES = {
    "data=1": fs.make_mesh(kind="simulated", data=1),
    "data=2": fs.make_mesh(kind="simulated", data=2),
    "data=2, model=2": fs.make_mesh(kind="simulated", data=2, model=2),
    "model=3": fs.make_mesh(kind="simulated", model=3),
    "abstract": fs.make_mesh(kind="abstract", data=4, model=2),
}
W, V, KEY, MESH, TREE = correct.W, correct.V, correct.KEY, correct.MESH, correct.TREE

# --- correct calls ------------------------------------------------------------------------------------------------


def _models() -> list[Call]:
    """Return calls of the functions of the model files, on tiny models."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    names = ("n_embd", "n_layer", "n_head", "n_positions")
    gpt = dict(zip(names, (8, 1, 2, 8), strict=True))
    hidden = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
              "max_position_embeddings": 8}  # fmt: skip
    configs = {
        fs.models.gpt2: gpt, fs.models.gptj: gpt | {"rotary_dim": 2}, fs.models.gpt_neox: hidden,
        fs.models.llama: hidden, fs.models.bert: hidden | {"pooler": True, "nsp": True},
        **{getattr(fs.models, name): hidden | {"num_key_value_heads": 1}
           for name in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "dots1")},
        fs.models.t5: {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    }  # fmt: skip
    calls = []
    one = fs.make_mesh(kind="simulated", data=1)
    for model, sizes in configs.items():
        cfg = model.Config(vocab_size=12, **sizes)
        params = fs.device_get(fs.materialize(model.init(cfg), P(), one, key=KEY))
        common = {"cfg": cfg, "params": params}
        options = {"layout": model.Layout(), "specs": model.specs(cfg), "key": None, "mask": None}
        given: dict[str, dict[str, Any]] = {
            "Config": {"vocab_size": 12, **sizes},
            "Layout": {"data": "data", "model": "model", "sequence": False, "batch": 2, "dtype": None},
            "init": {"cfg": cfg},
            "specs": {"cfg": cfg, "model": "model"},
            "apply": {**common, "ids": ids, **options, "remat": False},
            "loss": {**common, "ids": ids, "targets": ids, **options},
            "losses": {**common, "ids": ids, "targets": ids, **options},
            "generate": {**common, "ids": ids, "new": 2, "temperature": 0.0, "eos": 3, "layout": model.Layout()},
            "theirs": {"path": fs.tree.leaves_with_path(params)[-1][0]},
            "save": {"path": "model", **common},
            "states": {**common, "ids": ids, **options, "remat": False},
            "embed": {**common, "ids": ids},
            "pool": {"x": W[None], "mask": None},
            "logits": {**common, "ids": ids},
            "encode": {**common, "ids": ids, **options, "remat": False},
            "decode": {**common, "states": torch.ones(2, 3, 8), "decoder_ids": ids, **options, "decoder_mask": None},
            "shifted": {"cfg": cfg, "targets": ids},
            "pooled": {**common, "x": torch.ones(2, 3, 16)},
            "follows": {**common, "x": torch.ones(2, 3, 16)},
            "load": {"path": f"{model.__name__.rpartition('.')[2]}_saved"},
            "config": {"folder": f"{model.__name__.rpartition('.')[2]}_saved"},
        }
        given["Cache"] = {"capacity": 8}
        if model is fs.models.t5:
            given["apply"] |= {"decoder_ids": ids, "decoder_mask": None}
        model.save(given["load"]["path"], cfg, params)
        found = [Call(name, getattr(model, name), args) for name, args in given.items() if hasattr(model, name)]
        calls += prefixed(model.__name__.removeprefix("fshard."), *found)
    heads, base = fs.models.heads, fs.models.gpt2.Config(vocab_size=12, **gpt)
    head = {"base": base, "task": "sequence", "labels": ("a", "b"), "pad_token_id": 0}
    cfg = heads.Config(**head)
    params = fs.device_get(fs.materialize(heads.init(cfg), P(), one, key=KEY))
    common, options = {"cfg": cfg, "params": params, "ids": ids}, {"layout": heads.Layout(), "mask": None}
    heads.save("heads_saved", cfg, params)
    given = {
        "Config": head,
        "init": {"cfg": cfg},
        "specs": {"cfg": cfg, "model": "model"},
        "apply": {**common, **options, "specs": heads.specs(cfg), "key": None},
        "loss": {**common, **options, "targets": ids[:, 0] % 2},
        "embed": {"cfg": base, "params": params["base"], "ids": ids, "mask": None, "pooling": "mean"},
        "has_head": {"config": {"model_type": "gpt2"}},
        "theirs": {"path": ("score", "w"), "cfg": cfg},
        "config": {"folder": "heads_saved"},
        "load": {"path": "heads_saved"},
        "save": {"path": "heads", "cfg": cfg, "params": params},
    }
    calls += prefixed("models.heads", *(Call(name, getattr(heads, name), args) for name, args in given.items()))
    decoder = {"cfg": base, "layout": fs.models.gpt2.Layout(), "specs": P(), "microbatches": 2, "schedule": "1f1b",
               "chunks": 1, "remat": False}  # fmt: skip
    calls += prefixed("models.stages", Call("pipelined", fs.models.stages.pipelined, decoder))
    return calls + _resnet(one)


def _resnet(one: fs.Mesh) -> list[Call]:
    resnet = fs.models.resnet
    sizes = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": (8,), "depths": (1,), "num_labels": 5}
    cfg, x, targets = resnet.Config(**sizes), torch.ones(2, 1, 8, 8), torch.tensor([1, 4])
    trees = {"params": resnet.init(cfg), "state": resnet.state(cfg)}
    trees = fs.device_get(fs.materialize(trees, P(), one, key=KEY))
    common, options = {"cfg": cfg, **trees}, {"layout": resnet.Layout(), "specs": resnet.specs(cfg)}
    resnet.save("resnet_saved", cfg, trees)
    given: dict[str, dict[str, Any]] = {
        "Config": sizes,
        "Layout": {"data": "data", "model": "model", "dtype": None},
        "init": {"cfg": cfg},
        "state": {"cfg": cfg},
        "specs": {"cfg": cfg, "model": "model"},
        "features": {**common, "x": x, "train": True, **options, "remat": False},
        "head_inputs": {"cfg": cfg, "params": trees["params"], "x": torch.ones(2, 8), "targets": targets, **options},
        "apply": {**common, "x": x, "train": False, **options},
        "loss": {**common, "x": x, "targets": targets, "train": True, **options, "label_smoothing": 0.1},
        "theirs": {"path": ("params", "fc", "w")},
        "config": {"folder": "resnet_saved"},
        "load": {"path": "resnet_saved"},
        "save": {"path": "resnet", "cfg": cfg, "weights": trees},
    }
    return prefixed("models.resnet", *(Call(name, getattr(resnet, name), args) for name, args in given.items()))


def _others() -> list[Call]:
    """Return correct calls of functions of which `tests.test_wrong_arguments` has none."""
    step = fs.shard_map(correct.double, mesh=MESH, in_specs=(P("data"),), out_specs=P("data"))
    folder = "gpt2_saved"
    cfg, described = fs.hf.load(folder)
    flat, treedef = fs.tree.flatten(TREE)
    return [
        Call("check", _by_position(fs.check), {"f": step, "x": V}),
        Call("recording", _recorded, {"axis": "data"}, inside=True),
        outside(fs.replicated),
        *prefixed("devices", outside(fs.devices.write, device=fs.devices.H100, path="device.json")),
        *prefixed("tree",
            Call("map", lambda f, tree, rest: fs.tree.map(f, tree, rest),  # noqa: PLW0108  rest has no name
                 {"f": lambda a, b: a, "tree": TREE, "rest": TREE}),
            Call("map_with_path", fs.tree.map_with_path, {"f": lambda p, a: a, "tree": TREE}),
            outside(fs.tree.unflatten, treedef=treedef, leaves=flat),
            outside(fs.tree.flatten, tree=TREE),
            outside(fs.tree.leaves, tree=TREE),
            outside(fs.tree.leaves_with_path, tree=TREE),
            Call("structure", lambda tree: fs.tree.structure(tree), {"tree": TREE}),  # noqa: PLW0108  by position only
            outside(fs.tree.dotted, path=("h", 3)),
            outside(fs.tree.show, name="params", path=("h", 3)),
            outside(fs.tree.register, cls=dataclasses.make_dataclass("Registered", ["x"])),
            Call("all", fs.tree.all, {"tree": {"a": True, "b": 1}}),
            Call("reduce", fs.tree.reduce, {"f": lambda a, b: a, "tree": TREE}),
            Call("transpose", fs.tree.transpose, {"outer": treedef,
                 "inner": fs.tree.structure([1, 2]), "tree": {"w": [1, 2], "b": [3, 4]}}),
            Call("broadcast", fs.tree.broadcast, {"prefix": P(), "tree": TREE, "name": "specs",
                 "leaf": lambda x: isinstance(x, P), "kind": "P"}),
        ),
        *prefixed("hf",
            outside(fs.hf.load, path=folder, specs=P(), mesh=MESH),
            outside(fs.hf.weights, path=folder, described={"transformer": {"wte": {"weight": described["wte"]}}},
                    of=None, prefix="", ignored=["weight", "bias"], missing=["wte.weight"]),
            outside(fs.hf.save, path="again", cfg=cfg, params=fs.materialize(described, P(), MESH, key=KEY), of=None),
        ),
        *prefixed("interop.hf",
            outside(hf.config_of, folder=folder),
            outside(hf.read_json, path=Path(folder) / hf.CONFIG),
            outside(hf.tensors, path=folder),
            outside(hf.read, folder=folder, described={"wte": described["wte"]}, prefix="", ignored=["weight", "bias"],
                    theirs=lambda path: hf.FileTensor("transformer.wte.weight"), copies=None),
            outside(hf.write, folder="module", tree_=TREE, theirs=lambda path: hf.FileTensor(fs.tree.dotted(path)),
                    config={"model_type": "none"}, prefix="", max_shard_bytes=100, metadata=None, described=None),
        ),
    ]  # fmt: skip


def _recorded(axis: Any) -> Any:
    with fs.recording() as record:
        fs.psum(fs.pvary(V, axis), axis)
    return record


def faces() -> dict[str, types.ModuleType]:
    """Return the public modules by name: those that `fs` names, theirs, and the packages of one without names."""
    found: dict[str, types.ModuleType] = {}

    def visit(name: str, module: types.ModuleType) -> None:
        found[name] = module
        names = getattr(module, "__all__", None) or vars(module)
        for child in names:
            value = getattr(module, child, None)
            inner = f"{module.__name__}.{child}"
            if isinstance(value, types.ModuleType) and value.__name__ == inner and not child.startswith("_"):
                visit(inner.removeprefix("fshard."), value)

    visit("fs", fs)
    modules = {name: x for name in fs.__all__ if isinstance(x := getattr(fs, name), types.ModuleType)}
    return {name: x for name, x in modules.items() if x not in found.values()} | found  # `fs.hf`, inside a package


def public_functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions and classes by name, each once."""
    found: dict[int, tuple[str, Callable[..., Any]]] = {}
    for face, module in faces().items():
        own = [n for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
        for name in getattr(module, "__all__", None) or [n for n in own if not n.startswith("_")]:
            f = getattr(module, name)
            is_protocol = isinstance(f, type) and getattr(f, "_is_protocol", False)
            if callable(f) and not is_protocol and not (isinstance(f, type) and issubclass(f, Exception)):
                found.setdefault(id(f), (f"{face.removeprefix('fs.')}.{name}".removeprefix("fs."), f))
    return dict(found.values())


# Made by the functions of their packages, and not by callers.
NOT_MADE = ("Apply", "interop.hf.WeightHeaders", "interop.hf.FileTensor", "checkpoint.Saved")


def correct_calls() -> list[Call]:
    """Return the correct calls; writes the folders that some read into the current one."""
    calls = [*correct.CALLS, *correct.checkpoint_calls(Path("checkpoints").absolute()), *_models(), *_others()]
    called = {inspect.unwrap(c.f) for c in calls} | {c.name for c in calls}
    called |= {getattr(fs.tree, name) for name in fs.tree.__all__}  # some are optree's own, under other names
    for name, f in public_functions().items():
        if (
            inspect.unwrap(f) not in called
            and name not in (*called, *NOT_MADE)
            and (made := _made(name, f)) is not None
        ):
            calls.append(made)
    return calls


def _made(name: str, f: Callable[..., Any]) -> Call | None:
    """Return a call with arguments by the names and annotations of the parameters; None if there is no signature."""
    try:
        parameters = inspect.signature(f).parameters.values()
        hints = typing.get_type_hints(f.__init__ if isinstance(f, type) else f)
    except (TypeError, ValueError, NameError):
        return None
    args = {p.name: _BY_NAME.get(p.name, p.default if p.default is not p.empty else _of_hint(hints.get(p.name, Any)))
            for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}  # fmt: skip
    return Call(name, f, args)


_BY_NAME: dict[str, Any] = {
    "tree": TREE, "tree_": TREE, "specs": P(), "spec": P(), "mesh": MESH, "key": KEY, "path": "checkpoints/saved",
    "folder": "gpt2_saved", "described": correct.DESCRIBED, "shape": (4, 4), "box": correct.BOX, "axis": "data",
}  # fmt: skip


def _of_hint(hint: Any) -> Any:
    """Return a value of the kind of an annotation."""
    for kind, value in ((bool, True), (int, 2), (float, 0.5), (str, "data"), (Tensor, W), (P, P()), (fs.Mesh, MESH),
                        (torch.dtype, torch.float32), (Path, Path("checkpoints"))):  # fmt: skip
        if hint is kind or kind in typing.get_args(hint):
            return value
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and issubclass(origin, (list, tuple, collections.abc.Sequence)):
        return [_of_hint((*typing.get_args(hint), Any)[0])]
    return correct.double if "Callable" in str(origin) else TREE


# --- changed arguments --------------------------------------------------------------------------------------------


def _wrong_arity() -> None:
    return None


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("of the caller")


FUNCTIONS = (_wrong_arity, _raises, correct.double, correct.loss, correct.block, lambda *a: a[0], lambda *a: None)
_USERS_NAMES = ("<lambda>", "_wrong_arity", "double", "loss", "block")
USERS = {f.__code__ for f in FUNCTIONS} | {correct.Call.run.__code__}
DTYPES = (
    torch.int8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.uint8,
)
KINDS = [
    *correct.WRONG.values(),
    fs.init.ones(4),
    {"w": None},
    [[]],
    1 << 70,
    float("inf"),
    "a\x00b",
    object,
    frozenset(),
]


def changed(rng: random.Random, x: Any) -> Any:
    """Return a neighbour of a value, or, in one of five, an object of another kind."""
    if rng.random() < 0.2:
        return rng.choice(KINDS)
    if isinstance(x, Tensor):
        return _changed_tensor(rng, x)
    if isinstance(x, bool):
        return rng.choice([not x, int(x), str(x), None])
    if isinstance(x, int):
        return rng.choice([0, -1, 1, 3, 7, x + 1, -x, -x - 1, 10**12, True, float(x), str(x), torch.tensor(x), None])
    if isinstance(x, float):
        return rng.choice([0.0, -1.0, float("nan"), float("inf"), -x, 1e308, str(x), 2, True, None, torch.tensor(x)])
    if isinstance(x, str):
        return rng.choice(["data", "model", "no_such", "", ("data", "model"), ("data", "data"), ("model",), (), None, 0,
                           x.upper(), [x], x.encode()])  # fmt: skip
    if isinstance(x, P):
        return rng.choice([P("data"), P(None, "model"), P("data", "model", None, "seq"), P("no_such"), P(..., "model"),
                           P(("data", "model")), P("model", memory="host"), "data", None, (P(), P())])  # fmt: skip
    if isinstance(x, fs.Mesh):
        return rng.choice([*MESHES.values(), fs.make_mesh(kind="simulated", other=2), "data", None, {"data": 2}])
    if isinstance(x, torch.dtype):
        return rng.choice([*DTYPES, "float32", float, None])
    if isinstance(x, fs.Sharded):
        return rng.choice([fs.device_get(x), fs.reshard(x, P("model")), {"x": x}, [x, x], fs.init.zeros(x.shape)])
    if isinstance(x, fs.Deferred):
        return rng.choice([fs.init.zeros((3, 5)), fs.init.arange(4), fs.init.orthogonal((4, 4)), W, [x], {"w": x}])
    if isinstance(x, dict):
        return _changed_dict(rng, x)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return _changed_sequence(rng, x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return _changed_fields(rng, x)
    if callable(x):
        return rng.choice(FUNCTIONS)
    if x is None:
        return rng.choice(
            [0, 1, 2, "data", ("data",), "no_such", P("data"), W, V, KEY, TREE, torch.float16, True, 0.5, MESH]
        )
    return rng.choice(KINDS)


def _changed_tensor(rng: random.Random, x: Tensor) -> Any:
    n, flat, zeros = max(x.shape, default=1), x.reshape(-1), x.new_zeros
    makers: list[Callable[[], Any]] = [
        # other shapes
        lambda: x[..., :0] if x.ndim else x, lambda: x[:0] if x.ndim else x[None], lambda: x[None], lambda: flat,
        x.sum, lambda: zeros(3, 5), lambda: x.new_ones(n + 1), lambda: torch.cat([flat, flat]),
        lambda: x.expand(2, *x.shape), lambda: zeros(()), lambda: zeros(0), lambda: x.mT if x.ndim > 1 else x,
        # other dtypes, devices, layouts and values
        lambda: x.to(rng.choice(DTYPES)), lambda: x.to(rng.choice(DTYPES)), lambda: x.to("meta"), x.to_sparse,
        lambda: x.double().requires_grad_(), lambda: x.float() * float("nan"), lambda: -x.float().long() - 5,
        lambda: x if x.dtype == torch.bool else x + 1000,
        # no tensors
        lambda: fs.device_put(x, P(), MESH), lambda: fs.init.zeros(tuple(x.shape)), x.tolist, x.numpy,
        lambda: {"x": x}, lambda: [x, x], lambda: None, lambda: P("data"),
    ]  # fmt: skip
    return rng.choice(makers)()


def _changed_dict(rng: random.Random, x: dict[Any, Any]) -> Any:
    if not x:
        return rng.choice([{"a": 1}, None, [], {0: None}])
    at = rng.choice(sorted(x, key=str))
    rest = {k: v for k, v in x.items() if k != at}
    if rng.random() < 0.4:
        return {**x, at: changed(rng, x[at])}
    return rng.choice([rest, {**x, "extra": x[at]}, {**rest, f"{at}2": x[at]}, {}, list(x.values()), {**x, 3: x[at]},
                       {**x, at: None}, {**x, at: [x[at]]}, x[at], {at: x}, tuple(x.items())])  # fmt: skip


def _changed_sequence(rng: random.Random, x: Any) -> Any:
    kind = type(x)
    if not x:
        return rng.choice([kind([0]), None, "", kind(["a"]), kind([None])])
    at = rng.randrange(len(x))
    if rng.random() < 0.4:
        return kind([*x[:at], changed(rng, x[at]), *x[at + 1 :]])
    return rng.choice([kind(), x[:at] + x[at + 1 :], x + x[:1], x[::-1], x[0], kind([x]), str(x), set(map(str, x)),
                       iter(x), torch.ones(2)])  # fmt: skip


def _changed_fields(rng: random.Random, x: Any) -> Any:
    """Return a dataclass with one field changed; the object itself where its class refuses the value."""
    name = rng.choice([f.name for f in dataclasses.fields(x) if f.init])
    try:
        return dataclasses.replace(x, **{name: changed(rng, getattr(x, name))})
    except Exception:  # the call of the class itself is another of the calls
        return rng.choice([x, None, vars(x)])


# --- one call -----------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """One drawn call: its arguments, and where it is made."""

    call: Call
    args: dict[str, Any]
    changes: tuple[str, ...]  # names of the changed arguments
    mesh: str  # "": outside
    check: str
    transform: str
    varies: bool

    def __str__(self) -> str:
        args = ", ".join(f"{name}={_short(x)}" + "*" * (name in self.changes) for name, x in self.args.items())
        at = f" on {self.mesh}, check={self.check!r}{', varying' * self.varies}" if self.mesh else ""
        return f"{self.call.name}({args}){at}{f' under {self.transform}' if self.transform else ''}"


def _short(x: Any) -> str:
    if isinstance(x, Tensor):
        grad = ", grad" * x.requires_grad
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{'' if x.device.type == 'cpu' else x.device}{grad}"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k!r}: {_short(v)}" for k, v in list(x.items())[:6]) + "}"
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return f"{type(x).__name__}[{', '.join(map(_short, x[:6]))}]"
    try:
        text = repr(x)
    except Exception:  # a record of wrong values, a plan whose mesh is no dict, need not have a text
        text = object.__repr__(x)
    return text if len(text) < 80 and "\n" not in text else f"{text[:60]}...".replace("\n", " ")


def draw(rng: random.Random, calls: dict[str, list[Call]]) -> Made:
    """Draw a function, then one of its correct calls, what is changed, and where the call is made."""
    call = rng.choice(calls[rng.choice(sorted(calls))])
    args = {name: _copied(x) for name, x in call.args.items()}
    count = min(rng.choices([0, 1, 2], [2, 5, 3])[0], len(args))
    changes = tuple(rng.sample(sorted(args), count))
    for name in changes:
        args[name] = changed(rng, args[name])
    if call.f.__name__ != "<lambda>" and rng.random() < 0.03:
        changes += ("arity",)
        args = {**args, "no_such": 1} if not args or rng.random() < 0.5 else dict(list(args.items())[1:])
    mesh = rng.choices([*MESHES], [1, 2, 4, 1, 1])[0] if call.inside or rng.random() < 0.3 else ""
    check = rng.choice(["first", "never"])
    transform = rng.choice(["grad", "vmap", "jvp"]) if rng.random() < 0.1 else ""
    return Made(call, args, changes, mesh, check, transform, call.inside and rng.random() < 0.7)


def _copied(x: Any) -> Any:
    """Return a tree with new tensors: a call may write into its arguments."""
    if isinstance(x, dict):
        return {k: _copied(v) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(_copied, x))
    return x.clone() if type(x) is Tensor else x


def run(made: Made) -> Any:
    """Make the call. Return the tensors of its result, of the first rank if it is on a mesh."""
    if not made.mesh:
        return _transformed(made, made.args)
    mesh = MESHES[made.mesh]
    moved = {name: x for name, x in made.args.items() if _passed(x)}
    results: list[Any] = []

    def region(*tensors: Any) -> None:
        args = {**made.args, **dict(zip(moved, tensors, strict=True))}
        if made.varies and made.check == "first":
            args = {k: fs.pvary(x, tuple(mesh.axes)) if k in moved and k != "key" else x for k, x in args.items()}
        results.append(_transformed(made, args))

    fs.shard_map(
        region, mesh=mesh, in_specs=tuple(P() for _ in moved) if moved else None, out_specs=P(), check=made.check
    )(*moved.values())  # type: ignore[arg-type]
    return results[0]


def _passed(x: Any) -> bool:
    """Return whether an argument is passed through `shard_map`, and not by a closure: a tree of ordinary tensors."""
    leaves = fs.tree.leaves(x) if isinstance(x, (dict, list, tuple)) else [x]
    return bool(leaves) and all(type(t) is Tensor and not t.requires_grad and t.layout is torch.strided and
                                t.device.type == "cpu" for t in leaves)  # fmt: skip


def _transformed(made: Made, args: dict[str, Any]) -> Any:
    f = made.call.f
    at = [name for name, x in args.items() if type(x) is Tensor and x.is_floating_point() and x.device.type == "cpu"]
    if not made.transform or not at:
        return f(**args)
    name = at[0]

    def of_one(t: Tensor) -> Any:
        out = f(**{**args, name: t})
        tensors = [x for x in fs.tree.leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        if made.transform != "grad":
            return tensors
        return sum((x.sum() for x in tensors), (0 * t).sum())

    if made.transform == "grad":
        return torch.func.grad(of_one)(args[name])
    if made.transform == "vmap":
        return torch.func.vmap(of_one)(torch.stack([args[name]] * 2))
    return torch.func.jvp(of_one, (args[name],), (torch.ones_like(args[name]),))


# --- outcomes -----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    index: int
    function: str
    changes: int
    kind: str
    where: str  # type and line of an unclear error
    call: str
    text: str


class _TooLong(BaseException):
    pass


_VALUE = re.compile(r"""\d|'|"|\[|\(|\bgot\b|fix: """)
_ARITY = re.compile(r"^[\w.<>]+\(\) (takes|missing|got) |^missing a required argument|^got an unexpected keyword")
_BYTES = re.compile("ried to allocate|Unable to allocate|Storage size calculation overflowed|invalid memory size")
_TRANSFORM = re.compile(
    "vmap|jvp|vjp|functorch|torch.func|forward AD|forward-mode|grad_fn|double backward|derivative for"
)
_PYTHONS = re.compile(
    "(list|tuple|string) index out of range|values to unpack|math domain|not in list|empty (list|deque)"
)


def classify(made: Made, e: BaseException) -> tuple[str, str]:
    """Return the outcome of an exception, by the rule above, and, if it is unclear, its type and line."""
    frames = [frame for frame, _ in traceback.walk_tb(e.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(e.__traceback__)]
    files = [frame.f_code.co_filename for frame in frames]
    # Under a checked call every operation of torch runs through frames of the checker.
    ours = max((i for i, f in enumerate(files) if "/fshard/" in f and "/typecheck/" not in f), default=-1)
    passed = [getattr(x, "__code__", None) for x in made.args.values()]
    codes = USERS.union(code for code in passed if code is not None and "/tests/" in code.co_filename)
    callers = max((i for i, frame in enumerate(frames) if frame.f_code in codes), default=-1)
    where = f"{type(e).__name__} at " + (
        f"{files[ours].rpartition('/fshard/')[2]}:{lines[ours]}" if ours >= 0 else "the call"
    )
    if isinstance(e, _TooLong):
        return "unclear", f"hang, {where}"
    text, notes = str(e), "\n".join(getattr(e, "__notes__", ()))
    of_function = re.match(r"([\w.<>]+)\(\) (takes|missing|got) ", text)
    if callers > ours or "of the caller" in text or (of_function and of_function[1].rpartition(".")[2] in _USERS_NAMES):
        return "users", ""
    if isinstance(e, TypeError) and _ARITY.search(text) and "arity" in made.changes:
        return "arity", ""
    in_fshard = bool(files) and "/fshard/" in files[-1]
    is_own = isinstance(e, fs.ShardingError) or (type(e) in (TypeError, ValueError) and in_fshard)
    if is_own and _names(made, text) and _VALUE.search(text):
        return "named", ""
    if isinstance(e, OSError) and e.filename is not None:
        return "system", ""
    if (isinstance(e, (RuntimeError, MemoryError)) and _BYTES.search(text)) or isinstance(e, torch.OutOfMemoryError):
        return "torch", ""
    if isinstance(e, (RuntimeError, ValueError)) and made.transform and _TRANSFORM.search(text):
        return "transform", ""
    is_torchs = type(e) in (RuntimeError, IndexError, ValueError, NotImplementedError) and not _PYTHONS.search(text)
    if is_torchs and _names(made, notes) and _VALUE.search(notes):
        return "torch", ""
    return "unclear", where


_PLACES = re.compile(r"args\[\d|argument|\w\['|\w\[\d|spec|mesh|leaf|region|shard_map|step|is not a checkpoint")


# Parts of arguments, or the words for them, by which an error may name them.
_WORDS = {**correct._PARTS, "cfg": r"\bconfig\b", "described": r"\bdescribe"}


def _names(made: Made, text: str) -> bool:
    """Return whether a text names the function, an argument, a leaf, or a string that was passed."""
    call = made.call
    names = [call.name.rpartition(".")[2].rstrip("()"), call.f.__name__, *(name.strip("_") for name in made.args)]
    patterns = [*(rf"(?<![^\W_]){re.escape(name)}" for name in names if name), *call.words.values(), _PLACES.pattern]
    patterns += [_WORDS[name] for name in made.args if name in _WORDS]
    if {"path", "folder"} & made.args.keys():
        patterns.append(r"\bfolder\b|config\.json")
    passed = [repr(x) for x in made.args.values() if isinstance(x, str)]
    passed += [str(x) for x in made.args.values() if isinstance(x, (str, Path)) and len(str(x)) > 1]
    return any(re.search(pattern, text) for pattern in patterns) or any(x in text for x in passed)


def drawn(seed: int, index: int, calls: dict[str, list[Call]]) -> Made:
    """Return one call of those of a seed."""
    return draw(random.Random(f"{seed}:{index}"), calls)


def attempt(seed: int, index: int, calls: dict[str, list[Call]]) -> tuple[Outcome, BaseException | None]:
    """Draw and make one call. Return its outcome and its exception."""
    made = drawn(seed, index, calls)
    error: BaseException | None = None
    kind, where, text = "returned", "", ""
    try:
        with _limit(MOST_SECONDS):
            out = run(made)
            if _has_parity(made):
                other = run(made._replace(mesh="data=2, model=2", check="never"))
                if not _same(out, other):
                    kind, where, text = "unclear", "parity", f"{_short(out)} and {_short(other)}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        error = e
        kind, where = classify(made, e)
        text = f"{type(e).__name__}: {e}" + "".join(f"\n{note}" for note in getattr(e, "__notes__", ()))
    return Outcome(index, made.call.name, len(made.changes), kind, where, str(made), text[:400]), error


def _has_parity(made: Made) -> bool:
    pure = made.call.name.startswith(("nn.", "optim.", "random.", "init.", "models."))
    return pure and not (made.changes or made.mesh or made.call.inside or made.transform) and "axis" not in made.args \
        and not made.call.name.endswith(("save", "load"))  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    one, other = ([x for x in fs.tree.leaves(t) if isinstance(x, Tensor)] for t in (a, b))
    return len(one) == len(other) and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Limit the CPU time; and the time that passes, which a busy machine makes many times as long."""

    def stop(*_: Any) -> None:
        raise _TooLong(f"more than {seconds} s")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(60 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def prepared() -> Iterator[dict[str, list[Call]]]:
    """Enter a temporary folder; the correct calls by function. Warnings are no outcome."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what it raises
        # Import what torch loads on the first use of fake tensors and transforms: seconds, and not of one call.
        importlib.import_module("torch._dynamo")
        fs.shard_map(lambda: torch.ones(2) @ torch.ones(2), mesh=MESHES["abstract"], out_specs=P(), check="never")()
        torch.func.jvp(torch.sin, (V,), (V,))
        calls: dict[str, list[Call]] = {}
        for call in correct_calls():
            calls.setdefault(call.name, []).append(call)
        yield calls


# --- the script ---------------------------------------------------------------------------------------------------


def _work(seed: int, start: int, stop: int, out: Path) -> None:
    """Make some calls, and write a line before and one after each: a call without the second ended the interpreter."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with prepared() as calls, out.open("a") as f:
        for index in range(start, stop):
            f.write(f"{index}\n")
            f.flush()
            f.write(json.dumps(attempt(seed, index, calls)[0]) + "\n")
            f.flush()


def make(seed: int, runs: int) -> list[Outcome]:
    """Make the calls in processes of their own, a new one after each end of the interpreter."""
    out: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        at = 0
        while at < runs:
            lines.write_text("")
            options = {"--work": lines, "--seed": seed, "--only": at, "--runs": runs}
            command = [sys.executable, "-m", "tests.faults.calls", *(str(x) for pair in options.items() for x in pair)]
            status = subprocess.run(command, check=False).returncode
            read = lines.read_text().splitlines()
            done = [Outcome(*json.loads(line)) for line in read if line.startswith("[")]
            out += done
            if len(done) < runs - at:
                if not read:
                    raise SystemExit(f"the calls could not be prepared: status {status}")
                at = int(read[-1] if not read[-1].startswith("[") else done[-1].index + 1)
                out.append(Outcome(at, "?", 0, "unclear", f"the interpreter ended with status {status}", "", ""))
            at = out[-1].index + 1
    return out


def table(outcomes: list[Outcome], seed: int) -> str:
    """Format the counts by function, the shares, and the unclear calls by place."""
    kinds = ["returned", "named", "users", "torch", "transform", "arity", "system", "unclear"]
    by_function = collections.Counter((o.function, o.kind) for o in outcomes)
    lines = [f"{'function':<28}" + "".join(f"{kind:>10}" for kind in kinds)]
    for name in sorted({o.function for o in outcomes}):
        lines.append(f"{name:<28}" + "".join(f"{by_function[name, kind] or '':>10}" for kind in kinds))
    total = collections.Counter(o.kind for o in outcomes)
    lines += [f"{'all':<28}" + "".join(f"{total[kind]:>10}" for kind in kinds), ""]
    near = sum(o.changes <= 1 for o in outcomes)
    at_door = sum(o.kind == "named" and " must be " in o.text.partition("\n")[0] for o in outcomes)
    share = lambda n: f"{n} of {len(outcomes)} ({n / len(outcomes):.0%})"  # noqa: E731
    lines += [f"nothing or one thing wrong: {share(near)}", f"refused by the kind of an argument: {share(at_door)}", ""]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for o in outcomes:
        if o.kind == "unclear":
            groups.setdefault((o.function, o.where), []).append(o)
    lines.append(f"unclear: {share(total['unclear'])}")
    for (function, where), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        one = found[0]
        lines += [f"{len(found):>5}  {function}: {where}   --seed {seed} --only {one.index}", f"         {one.call}",
                  *[f"           {line}" for line in one.text.splitlines()[:3]]]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random calls of every public function.")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="make one call, and print it with its traceback")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        _work(options.seed, options.only, options.runs, options.work)
    elif options.only is not None:
        with prepared() as calls:
            outcome, error = attempt(options.seed, options.only, calls)
        print(*outcome, sep="\n")
        if error is not None:
            traceback.print_exception(error)
    else:
        print(table(make(options.seed, options.runs), options.seed))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()

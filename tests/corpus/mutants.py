"""Mutation testing of the two checks: correct programs with a collective deleted, doubled or swapped, and who notices.

`python -m tests.corpus.mutants [part of a program's name]` prints the table: the types check a program when it runs,
`verify` compares its values on smaller meshes. A mutant is a program and a change of one call. A call is known by its
verb, its line and the number of times that the line ran before. So it is the same call on every rank, on the meshes of
`verify` (where a loop over ranks is shorter, and an axis of size 1 needs no collective), and when `remat` runs a body
again: its counts then begin as in the first run. The backward pass, made of transposes, follows the change.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P, ShardingError, collectives, errors
from fshard._core import ops as linear
from fshard._core.ops import CastMap
from fshard._core.protocol import Comm, index_of, size_of
from fshard._core.region import Region, region
from fshard.models import gpt2
from fshard.spec import box_shape, local_box, part_range

_SCAN, _UNSHARD, _TRANSFORMER = (
    importlib.import_module(f"fshard.{name}") for name in ("schedule.scan", "schedule.unshard", "models.transformer")
)

# --- calls and their changes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a verb, in the forward order of the program."""

    verb: str
    file: str
    function: str
    line: int
    nth: int  # number of earlier calls of this verb at this line


@dataclass(frozen=True)
class Mutant:
    call: Call
    change: str
    name: str = field(compare=False)  # without line numbers, which edits change

    @property
    def group(self) -> str:
        return self.change.split(":")[0]


@dataclass
class _CallLog:
    """The collectives of one call on one rank, and their axes, or the spec of its draw."""

    axes: tuple[str, ...] = ()
    maps: list[tuple[str, int]] = field(default_factory=list)  # kind, number of tensors
    spec: P | None = None


class _CurrentCall(threading.local):
    """The call that this rank runs, and the number of calls at each line of the region."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.counts: Counter[Any] = Counter()
        self.call: Call | None = None

    def enter(self, verb: str, frame: FrameType | None) -> Call:
        while frame is not None and frame.f_code.co_filename in (
            collectives.__file__,
            _UNSHARD.__file__,
            errors.__file__,
        ):
            frame = frame.f_back
        assert frame is not None
        if self.region is not region():
            self.region, self.counts = region(), Counter()
        # A comprehension is a function of its own in Python 3.11, and none in later ones: count it as its function.
        function = re.sub(r"(\.<locals>)?\.<(list|dict|set)comp>", "", frame.f_code.co_qualname).split(".")[-1]
        key = (verb, Path(frame.f_code.co_filename).name, function, frame.f_lineno)
        self.counts[key] += 1
        return Call(*key, self.counts[key] - 1)


class _NoCommunication:
    """A comm that sends nothing: each rank uses its own part in place of every other."""

    direct = False

    def __init__(self, comm: Comm) -> None:
        self.sizes, self.coords = comm.sizes, comm.coords

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return torch.stack([x] * size_of(axes, self.sizes))

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x[index_of(axes, self.sizes, self.coords)]

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x


Xs = Sequence[Tensor]
REPLICATED = P()
SAME_SHAPE = ("Sum", "Vary", "Permute", "MinMax")


def _delete(m: Any, xs: Xs) -> Xs:
    """Return what plain torch gives without the collective, of the same shapes."""
    if type(m).__name__ in SAME_SHAPE:
        return list(xs)
    if isinstance(m, linear.Slice):  # every rank takes the first part
        sizes = [part_range(size, m.sizes, m.coords)[1] for _, size in m.layout]
        return [x.narrow(dim, 0, n) for x, (dim, _), n in zip(xs, m.layout, sizes, strict=True)]
    out: Xs = replace(m, comm=_NoCommunication(m.comm)).run(xs)
    return out


def _double(m: Any, xs: Xs) -> Xs:
    once = linear.apply_map(m, xs)
    return linear.apply_map(m if type(m).__name__ in SAME_SHAPE else linear.Sum(m.comm, m.axes), once)


def _swap(m: Any, xs: Xs) -> Xs:
    if isinstance(m, linear.Sum):
        return linear.apply_map(replace(m, divisor=m.n if m.divisor == 1 else 1), xs)
    other = linear.Gather if isinstance(m, linear.GatherInvariant) else linear.GatherInvariant
    return linear.apply_map(other(m.comm, m.axes, m.layout), xs)


def _without_leaf(m: Any, j: int, xs: Xs) -> Xs:
    """Run the collective of a tree, but not for leaf `j`."""
    out = list(linear.apply_map(m, xs))
    out[j] = _delete(replace(m, layout=(m.layout[j],)) if hasattr(m, "layout") else m, [xs[j]])[0]
    return out


CHANGES: dict[str, Callable[[Any, Xs], Xs]] = {"delete": _delete, "double": _double, "swap": _swap}


def changes(log: _CallLog, sizes: dict[str, int]) -> list[str]:
    """Return every change of a call that makes another program of the same shapes."""
    if log.spec is not None:
        return ["draw: rank in the key", *(["draw: local, without spec"] if log.spec.axes else [])]
    kinds = {kind for kind, _ in log.maps}
    out = ["delete"]
    if not kinds & {"Slice", "Exchange"}:
        out.append("double")
    if kinds & {"Sum", "Gather", "Copy"}:
        out.append("swap")
    if len(log.axes) > 1:
        out += [f"axis: not over {a}" for a in log.axes]
    elif not kinds & {"Gather", "Copy", "Scatter", "Slice", "Exchange"}:
        out += [f"axis: over {a}" for a, n in sizes.items() if n == sizes[log.axes[0]] and a not in log.axes]
    if len(log.maps) == 1 and log.maps[0][1] > 1 and kinds <= {"Sum", "Vary", "Gather", "Copy"}:
        out += [f"leaf: {j}" for j in range(log.maps[0][1])]
    return out


@contextmanager
def changed(mutant: Mutant | None, log: dict[Call, _CallLog] | None = None) -> Iterator[list[int]]:
    """Run everything as `mutant`; yield the number of changed calls, as a list. `log` collects the calls of rank 0."""
    current = _CurrentCall()
    count = [0]
    target, change = (mutant.call, mutant.change) if mutant else (None, "")

    def entry(call: Call) -> _CallLog | None:
        return log.setdefault(call, _CallLog()) if log is not None and region().rank == 0 else None

    def on_leaves(verb: str, x: Any, axis: Any, f: Any, **more: Any) -> Any:
        call = current.enter(verb, sys._getframe(1))
        if call == target and change.startswith("axis"):
            count[0] += 1
            name = change.split()[-1]
            axis = name if change.startswith("axis: over") else tuple(a for a in axis if a != name)
        before, current.call = current.call, call
        try:
            return originals["_on_leaves"](verb, x, axis, f, **more)
        finally:
            current.call = before

    def unshard_apply(m: Any, how: Any, xs: Xs, frame: FrameType | None = None) -> Xs:
        before, current.call = current.call, current.enter(m.verb, frame or sys._getframe(1))
        try:
            return apply_map(m if how is None else CastMap.from_precision(m, how), xs)
        finally:
            current.call = before

    def apply_then_compute(m: Any, f: Any, x: Tensor, *weights: Tensor) -> Tensor:
        out: Tensor = f(unshard_apply(m, None, [x], sys._getframe(1))[0], *weights)
        return out

    def apply_map(m: Any, xs: Xs, real: Any = linear.apply_map) -> Xs:
        assert current.call is not None
        logged = entry(current.call)
        if logged is not None:
            logged.axes = m.axes
            logged.maps.append((type(m).__name__, len(xs)))
        if current.call != target or change.startswith("axis"):
            return real(m, xs)
        count[0] += 1
        return _without_leaf(m, int(change.split()[1]), xs) if change.startswith("leaf") else CHANGES[change](m, xs)

    def extreme(comm: Comm, axes: tuple[str, ...], op: str, tied: bool, xs: Xs) -> Xs:
        assert current.call is not None
        logged = entry(current.call)
        if logged is not None:
            logged.axes = axes
            logged.maps.append(("MinMax", len(xs)))
        real = originals["minmax"]
        if current.call != target or change.startswith("axis"):
            return real(comm, axes, op, tied, xs)
        count[0] += 1
        return list(xs) if change == "delete" else real(comm, axes, op, tied, real(comm, axes, op, tied, xs))

    def body(f: Any) -> Any:
        """Wrap a body of remat: later runs begin with the counts of the first."""
        first: list[Counter[Any]] = []

        def counted(*xs: Tensor) -> Any:
            if not first:
                first.append(current.counts.copy())
                return f(*xs)
            counts_before, current.counts = current.counts, first[0].copy()
            try:
                return f(*xs)
            finally:
                current.counts = counts_before

        return bodies(counted)

    def draw(name: str, real: Any) -> Any:
        def drawn(key: Tensor, shape: Any, *, spec: P = REPLICATED, **more: Any) -> Tensor:
            call = current.enter(name, sys._getframe(1))
            logged = entry(call)
            if logged is not None:
                logged.spec = spec
            if call != target:
                return real(key, shape, spec=spec, **more)
            count[0] += 1
            own = region()
            if change == "draw: rank in the key":
                return real(fs.fold_in(key, fs.axis_index(tuple(own.sizes))), shape, spec=spec, **more)
            return real(key, box_shape(local_box(shape, spec, own.sizes, own.coords)), **more)

        return drawn

    names = ("_on_leaves", "minmax")
    originals = {name: getattr(collectives, name) for name in names}
    remat = importlib.import_module("fshard.schedule.remat")  # fshard.schedule.remat is the function
    bodies = remat._Body
    patches = {"_on_leaves": on_leaves, "apply_map": apply_map, "minmax": extreme}
    draws = {name: draw(name, getattr(fs.random, name)) for name in ("bernoulli", "normal", "uniform")}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(collectives, **patches))
        stack.enter_context(mock.patch.object(_UNSHARD, "_apply", unshard_apply))
        # Run the plain loop, which calls the patched functions; schedules compute the same numbers.
        stack.enter_context(mock.patch.object(_TRANSFORMER, "apply_then_compute", apply_then_compute))
        stack.enter_context(mock.patch.object(_SCAN, "in_transform", return_value=True))
        stack.enter_context(mock.patch.object(remat, "_Body", body))
        stack.enter_context(mock.patch.multiple(fs.random, **draws))
        yield count


# --- checks and outcomes --------------------------------------------------------------------------------------

OUTCOMES = ("breaks", "types", "verify", "equal", "missed")
Program = Callable[..., tuple[Any, tuple[Any, ...]]]  # options of shard_map -> (mapped function, arguments)


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught_by: tuple[str, ...]  # of OUTCOMES, in their order

    @property
    def kind(self) -> str:
        return self.caught_by[0] if self.caught_by else "missed"


class Subject:
    """A correct program, its results and its mutants. A check that refuses the program cannot judge its mutants."""

    def __init__(self, program: Program) -> None:
        self.f, self.args = program(check="never")
        self.typed = program(check="always")[0]
        log: dict[Call, _CallLog] = {}
        with changed(None, log):
            self.expected = self.results()
        self.mutants: list[Mutant] = []
        places: Counter[Any] = Counter()
        for call, logged in log.items():
            place = (call.verb, call.file, call.function)
            places[place] += 1
            if logged.maps or logged.spec is not None:
                name = f"{call.verb} {places[place]} of {call.function} in {call.file.removesuffix('.py')}"
                self.mutants += [Mutant(call, c, f"{c}, {name}") for c in changes(logged, self.f.mesh.axes)]

    @cached_property
    def alarms(self) -> dict[str, str]:
        """The error of each check for the correct program, or ""."""
        return {"types": self.types(), "verify": self.verify()}

    def results(self) -> list[Tensor]:
        """Return every rank's part of every result."""
        return [part for leaf in fs.tree.leaves(self.f(*self.args)) for part in leaf.shards]

    def types(self) -> str:
        return _error_of(lambda: self.typed(*self.args))

    def verify(self) -> str:
        return _error_of(lambda: fs.verify(self.f, *self.args, locate=False))

    def outcome(self, mutant: Mutant) -> Outcome:
        """Run every check on a mutant."""
        checks = self._checks()
        with changed(mutant) as count:
            try:
                same = close(self.results(), self.expected)
            except Exception:
                return Outcome(mutant, ("breaks",))
            assert count[0], f"{mutant.name} did not run"
            caught = {"equal": same, **{name: bool(check()) for name, check in checks.items()}}
        return Outcome(mutant, tuple(c for c in OUTCOMES if caught.get(c)))

    def first_outcome(self, mutant: Mutant) -> Outcome:
        """Run checks on a mutant until one catches it."""
        checks = self._checks()
        with changed(mutant) as count:
            try:
                first = next((name for name, check in checks.items() if check()), "")
                first = first or ("equal" if close(self.results(), self.expected) else "")
            except Exception:
                first = "breaks"
            assert count[0], f"{mutant.name} did not run"
        return Outcome(mutant, (first,) if first else ())

    def _checks(self) -> dict[str, Callable[[], str]]:
        """Return the checks that pass the correct program; call this before anything is changed."""
        return {name: getattr(self, name) for name, alarm in self.alarms.items() if not alarm}


def _error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except ShardingError as e:
        return str(e)
    return ""


def close(xs: list[Tensor], ys: list[Tensor]) -> bool:
    """Return whether tensors are equal to some hundred roundings: sums here are of less than a hundred numbers."""

    def close_leaf(x: Tensor, y: Tensor) -> bool:
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        rtol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(x.dtype, 0.0)
        scale = float(y.abs().max()) if y.numel() else 0.0
        return torch.allclose(x, y, rtol=rtol, atol=rtol * scale, equal_nan=True)

    return all(close_leaf(x, y) for x, y in zip(xs, ys, strict=True))


# --- programs -------------------------------------------------------------------------------------------------
# Each returns a loss and all gradients. Legend: B batch, T time, D width, F hidden, V vocabulary; [F@model] is split.

PROGRAMS: dict[str, Program] = {}
DTYPE = torch.float64


def program(name: str) -> Callable[[Program], Program]:
    def add(f: Program) -> Program:
        PROGRAMS[name] = f
        return f

    return add


def normal(*shape: int, std: float = 0.5) -> Any:
    return fs.init.normal(shape, std=std, dtype=DTYPE)


def data(*shape: int, n: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=DTYPE)


def trained(
    loss: Callable[..., Tensor], described: Any, specs: Any, batch: Any, batch_specs: Any, axes: dict[str, int],
    **options: Any,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """Return shard_map of value_and_grad(loss), and its arguments: placed parameters and a batch."""
    mesh = fs.make_mesh(**axes)
    params = fs.materialize(described, specs, mesh, key=fs.key(0))
    in_specs = (specs, *batch_specs)
    f = fs.shard_map(fs.value_and_grad(loss), mesh=mesh, in_specs=in_specs, out_specs=(P(), specs), **options)
    return f, (params, *batch)


BOTH = {"data": 2, "model": 2}


def mlp_params() -> Any:
    return {"scale": normal(4), "shift": normal(4), "up": normal(4, 6), "up_b": normal(6), "down": normal(6, 4),
            "down_b": normal(4)}  # fmt: skip


MLP_SPECS = {"scale": P(), "shift": P(), "up": P(None, "model"), "up_b": P("model"), "down": P("model"), "down_b": P()}


@program("Megatron MLP")
def megatron(**options: Any) -> Any:
    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        p = fs.pvary(p, "data")
        h = fs.nn.layer_norm(x, p["scale"], p["shift"])
        h = torch.tanh(fs.pvary(h, "model") @ p["up"] + p["up_b"])  # [B, F@model]
        out = x + fs.psum(h @ p["down"], "model") + p["down_b"]
        return fs.pmean((out - y).square().mean(), "data")

    batch = data(4, 4), data(4, 4, n=1)
    return trained(loss, mlp_params(), MLP_SPECS, batch, (P("data"), P("data")), BOTH, **options)


@program("Megatron MLP, sequence parallel")
def megatron_sequence(**options: Any) -> Any:
    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        p = fs.pvary(p, "data")
        shared = fs.pvary({k: p[k] for k in ("scale", "shift", "down_b")}, "model")
        h = fs.nn.layer_norm(x, shared["scale"], shared["shift"])  # [B, T@model, D]
        h = torch.tanh(fs.all_gather(h, "model", 1) @ p["up"] + p["up_b"])  # [B, T, F@model]
        out = x + fs.psum_scatter(h @ p["down"], "model", 1) + shared["down_b"]
        return fs.pmean((out - y).square().mean(), ("data", "model"))

    batch, batch_specs = (data(2, 4, 4), data(2, 4, 4, n=1)), (P("data", "model"),) * 2
    return trained(loss, mlp_params(), MLP_SPECS, batch, batch_specs, BOTH, **options)


def two_layers(specs: Any, axes: dict[str, int], over: Any, **options: Any) -> Any:
    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        p = fs.unshard(p, specs, over)
        h = torch.tanh(x @ p["up"] + p["up_b"])
        return fs.pmean((h @ p["down"] - y).square().mean(), over)

    described = {"up": normal(4, 6), "up_b": normal(6), "down": normal(6, 4)}
    return trained(loss, described, specs, (data(4, 4), data(4, 4, n=1)), (P(over), P(over)), axes, **options)


@program("DDP")
def ddp(**options: Any) -> Any:
    return two_layers({"up": P(), "up_b": P(), "down": P()}, {"data": 2}, "data", **options)


@program("FSDP")
def fsdp(**options: Any) -> Any:
    return two_layers({"up": P("data"), "up_b": P(), "down": P(None, "data")}, {"data": 2}, "data", **options)


@program("HSDP")
def hsdp(**options: Any) -> Any:
    specs = {"up": P("shard"), "up_b": P(), "down": P(None, "shard")}
    return two_layers(specs, {"replica": 2, "shard": 2}, ("replica", "shard"), **options)


@program("accumulation")
def accumulation(**options: Any) -> Any:
    """Sum gradients over data once, and not once per microbatch."""

    def step(p: Any, x: Tensor, y: Tensor) -> Any:
        loss = lambda p, x, y: (torch.tanh(x @ p["w"] + p["b"]) - y).square().mean()  # noqa: E731
        return fs.pmean(fs.accumulate(loss, 2)(fs.pvary(p, "data"), x, y), "data")

    mesh = fs.make_mesh(data=2)
    params = fs.materialize({"w": normal(4, 3), "b": normal(3)}, P(), mesh, key=fs.key(0))
    f = fs.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), **options)
    return f, (params, data(4, 4), data(4, 3, n=1))


def gpt2_program(
    *, sequence: bool = False, fully: bool = False, rate: float = 0.0, remat: bool = False, **options: Any
) -> Any:
    cfg = gpt2.Config(vocab_size=11, n_positions=4, n_embd=8, n_layer=1, n_head=2, embd_pdrop=rate, attn_pdrop=rate,
                      resid_pdrop=rate)  # fmt: skip
    described = fs.tree.map(lambda d: normal(*d.shape), gpt2.init(cfg))  # no zeros and ones, which hide mistakes
    specs = gpt2.specs(cfg, model="model")
    if fully:
        specs = fs.fully_shard(specs, described, axis="data", min_size=9)
    layout = gpt2.Layout("data", "model", sequence)
    key = fs.key(1) if rate else None

    def loss(p: Any, ids: Tensor) -> Tensor:
        gathered = specs if fully else None
        return gpt2.loss(cfg, p, ids[:, :-1], ids[:, 1:], layout=layout, specs=gathered, key=key, remat=remat)

    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    specs = fs.tree.unflatten(fs.tree.structure(described), fs.tree.broadcast(
        specs, described, name="specs", leaf=lambda s: isinstance(s, P)))  # fmt: skip
    return trained(loss, described, specs, (ids,), (P("data"),), BOTH, **options)


GPT2: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, sequence parallel": {"sequence": True},
    "gpt2, fully sharded": {"fully": True},
    "gpt2, dropout": {"rate": 0.3},
    "gpt2, remat": {"remat": True},
    "gpt2, all of these": {"sequence": True, "fully": True, "rate": 0.3, "remat": True},
}
for _name, _options in GPT2.items():
    PROGRAMS[_name] = lambda _options=_options, **options: gpt2_program(**_options, **options)


@program("split vocabulary")
def vocabulary(**options: Any) -> Any:
    """Embed, and take a cross-entropy over 11 classes split in two; data ranks have unequal counts of targets."""

    def loss(p: Any, ids: Tensor, targets: Tensor) -> Tensor:
        p = fs.pvary(p, "data")
        x = fs.psum(fs.nn.embedding(fs.pvary(ids, "model"), p["table"], axis="model", size=11), "model")
        logits = fs.pvary(torch.tanh(x * p["scale"]), "model") @ p["head"]  # [B, T, V@model]
        return fs.nn.cross_entropy(logits, targets, axis="model", size=11, over="data", label_smoothing=0.1)

    g = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(0, 11, (4, 3), generator=g), torch.randint(0, 11, (4, 3), generator=g)
    targets[0, :2] = -100
    described = {"table": normal(11, 4), "scale": normal(4), "head": normal(4, 11)}
    specs = {"table": P("model"), "scale": P(), "head": P(None, "model")}
    return trained(loss, described, specs, (ids, targets), (P("data"), P("data")), BOTH, **options)


@program("clip and AdamW")
def optimizer(**options: Any) -> Any:
    mesh = fs.make_mesh(**BOTH)
    specs = {"up": P("data", "model"), "down": P("model"), "b": P()}
    described = {"up": normal(4, 6), "down": normal(6, 4), "b": normal(4)}
    # In float32, as the norm is: results in float64 would be compared more strictly than the norm allows.
    params = fs.materialize(described, specs, mesh, key=fs.key(0), dtype=torch.float32)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.1, specs), fs.optim.adamw(0.1))
    state_specs = opt.specs(specs)

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        p = fs.unshard(p, specs, "data")
        h = torch.tanh(fs.pvary(x, "model") @ p["up"])
        return fs.pmean((fs.psum(h @ p["down"], "model") + p["b"] - y).square().mean(), "data")

    def step(p: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        value, grads = fs.value_and_grad(loss)(p, x, y)
        norm = fs.optim.global_norm(grads, specs)
        p, state = opt.update(grads, state, p)
        return {"loss": value, "grads": grads, "norm": norm, "params": p, "state": state}

    out_specs = {"loss": P(), "grads": specs, "norm": P(), "params": specs, "state": state_specs}
    in_specs = (specs, state_specs, P("data"), P("data"))
    f = fs.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    return f, (params, opt.init(params), data(4, 4).float(), data(4, 4, n=1).float())


@program("pipeline")
def pipeline(**options: Any) -> Any:
    """Run stages in a row: each tick sends a microbatch to the next stage."""

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        n, stage = fs.axis_size("stage"), fs.axis_index("stage")
        first, last = stage == 0, stage == n - 1
        begin = fs.pvary(p["begin"], "stage")
        micro = fs.pvary(x, "stage").unbind()
        received, total = torch.zeros(2, 3, dtype=DTYPE), torch.zeros((), dtype=DTYPE)
        for tick in range(len(micro) + n - 1):
            h = torch.where(first, micro[min(tick, len(micro) - 1)] @ begin, received)
            for w in p["layers"]:
                h = torch.tanh(h @ w)
            if tick >= n - 1:
                error = (h - fs.pvary(y, "stage")[tick - n + 1]).square().mean()
                total = total + torch.where(last, error, 0.0)
            received = fs.ppermute(h, "stage", [(i, i + 1) for i in range(n - 1)])
        return fs.psum(total, "stage")

    described, specs = {"begin": normal(3, 3), "layers": normal(3, 3, 3, std=1.0)}, {"begin": P(), "layers": P("stage")}
    return trained(loss, described, specs, (data(2, 2, 3), data(2, 2, 3, n=1)), (P(), P()), {"stage": 3}, **options)


@program("attention, heads for sequence")
def ulysses(**options: Any) -> Any:
    """Split the sequence outside of attention and the heads inside, with an all_to_all before and after."""

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        p = fs.pvary(p, "seq")
        qkv = (x @ p["qkv"]).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)  # 3 of [B, H, T@seq, K]
        q, k, v = fs.all_to_all(qkv, "seq", split=2, concat=3)  # [B, H@seq, T, K]
        a = fs.nn.attention(q, k, v, causal=True)
        a = fs.all_to_all(a, "seq", split=2, concat=1)  # [B, H, T@seq, K]
        return fs.pmean((a.transpose(1, 2).flatten(2) @ p["out"] - y).square().mean(), "seq")

    described, batch_specs = {"qkv": normal(4, 18), "out": normal(6, 4)}, (P(None, "seq"),) * 2
    batch = data(2, 4, 4), data(2, 4, 4, n=1)
    return trained(loss, described, P(), batch, batch_specs, {"seq": 2}, **options)


@program("softmax over a split dim")
def split_softmax(**options: Any) -> Any:
    """Split the keys: maximum and sum of the weights are taken over all ranks. One pmax is differentiated."""

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        p = fs.pvary(p, "seq")
        q, k, v = fs.all_gather(x @ p["q"], "seq"), x @ p["k"], x @ p["v"]  # [T, D], [T@seq, D] twice
        scores = q @ k.T  # [T, T@seq]
        top = fs.pmax(scores.detach().amax(-1), "seq")
        exps = (scores - fs.pvary(top, "seq")[:, None]).exp()
        total = fs.psum({"sum": exps.sum(-1), "values": exps @ v}, "seq")
        largest = fs.pmax((x @ p["k"]).amax(0), "seq", grad="tied")
        out = total["values"] / total["sum"][:, None] + largest
        return (out - y).square().mean()

    described = {"q": normal(3, 3), "k": normal(3, 3), "v": normal(3, 3)}
    return trained(loss, described, P(), (data(6, 3), data(6, 3, n=1)), (P("seq"), P()), {"seq": 3}, **options)


@program("ring attention")
def ring(**options: Any) -> Any:
    """Send keys and values around the ring; each rank combines the parts for its queries."""

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        n = fs.axis_size("seq")
        p = fs.pvary(p, "seq")
        q, kv = x @ p["q"], (x @ p["k"], x @ p["v"])
        parts = []
        for _ in range(n):
            scores = q @ kv[0].T
            parts.append((scores.logsumexp(-1), F.softmax(scores, -1) @ kv[1]))
            kv = fs.ppermute(kv, "seq", [(i, (i + 1) % n) for i in range(n)])
        share = F.softmax(torch.stack([s for s, _ in parts]), 0)
        out = (share[..., None] * torch.stack([o for _, o in parts])).sum(0)
        return fs.pmean((out - y).square().mean(), "seq")

    described = {"q": normal(3, 3), "k": normal(3, 3), "v": normal(3, 3)}
    return trained(loss, described, P(), (data(6, 3), data(6, 3, n=1)), (P("seq"), P("seq")), {"seq": 3}, **options)


@program("gradients per example")
def per_example(**options: Any) -> Any:
    """Clip each example's gradient, then take the mean: value_and_grad inside vmap, inside the region."""
    specs = {"up": P(None, "model"), "down": P("model"), "b": P()}

    def step(p: Any, x: Tensor, y: Tensor) -> Any:
        p = fs.pvary(p, "data")

        def one(p: Any, x: Tensor, y: Tensor) -> Tensor:
            h = torch.tanh(fs.pvary(x * p["b"], "model") @ p["up"])
            return (fs.psum(h @ p["down"], "model") - y).square().mean()

        def clipped(x: Tensor, y: Tensor) -> Any:
            value, grads = fs.value_and_grad(one)(p, x, y)
            squares = fs.psum(grads["up"].square().sum() + grads["down"].square().sum(), "model")
            scale = (0.1 / (squares + grads["b"].square().sum()).sqrt()).clamp(max=1.0)
            split = fs.pvary(scale, "model")
            return value, {k: g * (scale if k == "b" else split) for k, g in grads.items()}

        values, grads = torch.func.vmap(clipped)(x, y)
        return values, fs.pmean(fs.tree.map(lambda g: g.mean(0), grads), "data")

    mesh = fs.make_mesh(**BOTH)
    described = {"up": normal(3, 4), "down": normal(4, 3), "b": normal(3)}
    params = fs.materialize(described, specs, mesh, key=fs.key(0))
    in_specs = (specs, P("data"), P("data"))
    f = fs.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(P("data"), specs), **options)
    return f, (params, data(4, 3), data(4, 3, n=1))


# --- the table ------------------------------------------------------------------------------------------------


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    counts = Counter(o.kind for o in outcomes)
    different = len(outcomes) - counts["equal"]
    share = f"{1 - counts['missed'] / different:8.1%}" if different else f"{'-':>8}"
    by_verify = sum("verify" in o.caught_by for o in outcomes)
    return f"{name:34}{len(outcomes):8}" + "".join(f"{counts[c]:8}" for c in OUTCOMES) + share + f"{by_verify:12}"


def main(part: str = "") -> None:
    print(f"{'program':34}{'mutants':>8}" + "".join(f"{c:>8}" for c in OUTCOMES) + "  caught  by verify")
    every: list[Outcome] = []
    lists: dict[str, list[str]] = {"equal": [], "missed": [], "false alarms": []}
    start = time.perf_counter()
    for name, program in PROGRAMS.items():
        if part not in name:
            continue
        subject = Subject(program)
        outcomes = [subject.outcome(m) for m in subject.mutants]
        every += outcomes
        print(_row(name, outcomes), flush=True)
        for kind in ("equal", "missed"):
            lists[kind] += [f"{name}: {o.mutant.name}" for o in outcomes if o.kind == kind]
        lists["false alarms"] += [f"{name}: {check}: {alarm}" for check, alarm in subject.alarms.items() if alarm]
    for group in ("delete", "double", "swap", "axis", "leaf", "draw"):
        print(_row(f"[{group}]", [o for o in every if o.mutant.group == group]))
    print(_row("all", every), f"   in {time.perf_counter() - start:.0f} s")
    for kind, lines in lists.items():
        print(f"\n{kind}: {len(lines)}", *lines, sep="\n  ")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))

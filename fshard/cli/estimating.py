"""`python -m fshard estimate`: the memory of training a model, for each dtype and strategy, without any storage.

Sizes of parameters, gradients and optimizer state are exact: those of the parts that `fs.fully_shard` gives rank 0,
which has the largest. To these are added, for a dtype of `c` bytes:

    NO_SHARD             c for each parameter, if the dtype is not float32: the copies that are computed with
    SHARD_GRAD_OP        c for each parameter: all are gathered until backward has used them
    FULL_SHARD           c for those of the two largest units: one is gathered while another computes
    a sharded strategy   c + 4 for each trained parameter of the largest unit: its gradients, and the sum over the ranks

A unit is a numbered block (`h.3`, `encoder.block.0`), and outside of blocks a module. Activations are not counted.
Source: Rajbhandari et al., 2020, "ZeRO": 16 bytes for each parameter with Adam in float32; Zhao et al., 2023, "PyTorch
FSDP", for the schedule.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fshard import lora, optim, tree
from fshard.errors import fail, number_of
from fshard.interop.accelerate.keys import STRATEGIES
from fshard.interop.accelerate.settings import read_launched
from fshard.planning.search import rank_bytes
from fshard.spec import P, fully_shard, size

from .inspecting import PATHS, Contents, cast_leaves, describe, read

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OPTIMIZERS: dict[str, Callable[[float], optim.Optimizer]] = {"adamw": optim.adamw, "sgd": optim.sgd}
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def add(commands: Any) -> None:
    """Add `estimate` to the commands of a parser."""
    command = commands.add_parser(
        "estimate", help="print the memory of training a model, for each dtype and strategy",
        description="Print the bytes of parameters, gradients, optimizer state and gathered weights, of the rank with "
                    "the most, without activations. Only configs and headers are read.",
    )  # fmt: skip
    option = command.add_argument
    option("model", metavar="MODEL", help=f"{PATHS}; or the name of a class of transformers, with its default config")
    option("--strategy", nargs="+", metavar="NAME", help=f"of {', '.join(STRATEGIES)} (default: all that differ)")
    option("--ranks", type=int, metavar="N", help="ranks of all machines (default: 8)")
    option("--machines", type=int, metavar="N", help="machines, over which the hybrid strategies replicate")
    option("--dtypes", nargs="+", metavar="DTYPE", help=f"to compute in: {', '.join(_DTYPES)} (default: the first two)")
    option("--optimizer", choices=_OPTIMIZERS, default="adamw")
    option(
        "--lora", type=int, metavar="RANK", help="only adapters of this rank train; the rest is frozen, in the dtype"
    )
    option("--targets", nargs="+", metavar="MODULE", help="modules to adapt, by their last parts: q_proj v_proj")
    option("--offload", action="store_true", help="parameters, gradients and optimizer state in host memory")
    option("--one_unit", "--one-unit", action="store_true", help="the model is one unit, as with NO_WRAP")
    option("--config_file", "--config-file", metavar="FILE", help="an Accelerate file, for what the options leave out")
    option("--json", action="store_true", help="print the numbers as JSON")
    command.set_defaults(run=_run)


@dataclass(frozen=True)
class Estimate:
    """Bytes of the rank with the most; `working` are gradients of one unit and the buffer of their sum."""

    dtype: str
    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    working: int
    device: int
    host: int


@dataclass(frozen=True)
class Model:
    """Described leaves: those that train, those that are frozen, and the others, which every rank has whole."""

    trained: Any
    frozen: Any
    others: Any


def _run(options: Any) -> str:
    names, ranks, machines = options.strategy, options.ranks, options.machines
    dtypes, offload, one_unit = options.dtypes, options.offload, options.one_unit
    if options.config_file:
        settings = read_launched(options.config_file, {})
        if settings.model > 1 or settings.reshard is not None:
            raise fail(f"estimate: {options.config_file} splits matrices over `model`, or keeps weights split over "
                       "`group`, which is not estimated", f"its axes are {settings.axes}",
                       fix="--ranks and --strategy, without --config_file")  # fmt: skip
        names = names or [settings.strategy]
        ranks = settings.processes if ranks is None else ranks
        machines = settings.axes.get("replica", settings.machines) if machines is None else machines
        dtypes = dtypes or [str(settings.compute).removeprefix("torch.")]
        offload, one_unit = offload or settings.offload, one_unit or settings.wrap is None
    ranks, machines = 8 if ranks is None else ranks, 1 if machines is None else machines
    if ranks < 1 or machines < 1 or ranks % machines:
        raise fail(f"estimate: {ranks} ranks on {machines} machines", f"{ranks} % {machines} = {ranks % machines}"
                   if ranks > 0 and machines > 0 else "1 or more of each", fix="--ranks 8 --machines 2")  # fmt: skip
    names = names or [name for name in STRATEGIES if machines > 1 or name not in _HYBRID]
    names = [_known("--strategy", name.upper(), {**{s: s for s in STRATEGIES}, STRATEGIES[4][1:]: STRATEGIES[4]})
             for name in names]  # fmt: skip
    dtypes = [_known("--dtypes", name, {name: name for name in _DTYPES}) for name in dtypes or list(_DTYPES)[:2]]
    contents = _contents(options.model)
    model = model_of(contents, options.lora, options.targets)
    rows = [
        estimate(model, dtype, name, ranks=ranks, machines=machines, optimizer=options.optimizer, offload=offload,
                 one_unit=one_unit) for dtype in dtypes for name in names
    ]  # fmt: skip
    trained, frozen = _count(model.trained), _count(model.frozen)
    if options.json:
        numbers = {"trained": trained, "frozen": frozen, "ranks": ranks, "machines": machines}
        table = [dataclasses.asdict(row) for row in rows]
        return json.dumps({"model": options.model, **numbers, "optimizer": options.optimizer, "rows": table}, indent=2)
    counts = f"{frozen:,} frozen parameters, and {trained:,} that train" if frozen else f"{trained:,} parameters"
    where = number_of(ranks, "rank") + f" on {machines} machines" * (machines > 1)
    facts = f"{counts}; {options.optimizer}; {where}"
    head = f"{facts}; bytes of the rank with the most, without activations"
    return "\n".join([f"{options.model}: {contents.source}", head, *_table(rows)])


def _known(option: str, name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise fail(f"estimate: {option} {name}", fix=f"one of {', '.join(dict.fromkeys(known.values()))}")
    return known[name]


def _contents(name: str) -> Contents:
    """Describe the model at a path, or that of a class of transformers with its default config."""
    if Path(name).exists() or not name.isidentifier():
        return read(name)
    try:
        import transformers
    except ImportError as e:
        raise fail(
            f"estimate: {name} is no path, and transformers is not installed", fix="pip install transformers"
        ) from e
    made = getattr(transformers, name, None)
    config = getattr(made, "config_class", None)
    if not isinstance(made, type) or config is None:
        raise fail(f"estimate: {name} is neither a path nor a class of transformers that has a config",
                   fix=f"{PATHS}; or T5ForConditionalGeneration")  # fmt: skip
    return describe(name, lambda: made(config()), name)


def model_of(contents: Contents, rank: int | None = None, targets: Sequence[str] | None = None) -> Model:
    """Divide the leaves: of a checkpoint its `params`, of a module its parameters; with a rank only adapters train."""
    leaves, buffers = contents.tree, {}
    if isinstance(leaves, dict) and "params" in leaves:
        leaves, buffers = leaves["params"], leaves.get("buffers", {})
    tensors = [(path, x) for path, x in tree.leaves_with_path(leaves) if hasattr(x, "shape")]
    floating = {path: x for path, x in tensors if x.dtype.is_floating_point}
    others = [buffers, [x for path, x in tensors if path not in floating]]
    if not floating:
        raise fail("estimate: there are no parameters", fix="python -m fshard inspect shows the leaves")
    base = cast_leaves(floating, torch.float32)
    if rank is None:
        if targets:
            raise fail("estimate: --targets without --lora", fix="--lora 8")
        return Model(base, {}, others)
    if not targets:
        raise fail("estimate: --lora without --targets", fix="--targets q_proj v_proj")
    cfg = lora.Config(targets=list(targets), rank=rank)
    return Model(lora.init(cfg, leaves, of=contents.names), base, others)


def estimate(
    model: Model, dtype: str, strategy: str, *, ranks: int, machines: int = 1, optimizer: str = "adamw",
    offload: bool = False, one_unit: bool = False,
) -> Estimate:  # fmt: skip
    """Return the bytes of one dtype and strategy. What trains is stored in float32, what is frozen in the dtype."""
    shards = {"NO_SHARD": 1}.get(strategy, ranks // machines if strategy in _HYBRID else ranks)
    axes, width = {"data": shards}, _DTYPES[dtype].itemsize
    frozen = cast_leaves(model.frozen, _DTYPES[dtype])
    specs = {name: fully_shard(P(), x, axis="data") for name, x in (("trained", model.trained), ("frozen", frozen))}
    made = _OPTIMIZERS[optimizer](1e-3)
    gradients = rank_bytes(model.trained, specs["trained"], axes)
    parameters = gradients + rank_bytes(frozen, specs["frozen"], axes) + rank_bytes(model.others, P(), axes)
    state = rank_bytes(made.init(model.trained), made.specs(specs["trained"]), axes)
    units = _units([model.trained, model.frozen], one_unit)
    trained = _units([model.trained], one_unit)
    is_copied = width != 4 or offload
    if shards > 1 and strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        gathered = sum(sorted(units)[-2:]) * width
    elif shards > 1:
        gathered = sum(units) * width
    else:  # what trains is used as it is stored, or cast; what is frozen is stored in the dtype
        gathered = (sum(units if offload else trained)) * width * is_copied
    working = max(trained, default=0) * (width + 4) if shards > 1 else 0
    stored = parameters + gradients + state
    return Estimate(dtype, strategy, parameters, gradients, state, gathered, working,
                    gathered + working + (0 if offload else stored), stored if offload else 0)  # fmt: skip


def _units(trees: Sequence[Any], one_unit: bool) -> list[int]:
    """Return the number of parameters of each unit."""
    units: dict[Any, int] = {}
    seen: set[int] = set()
    for path, x in (row for t in trees for row in tree.leaves_with_path(t)):
        if id(x) in seen:
            continue
        seen.add(id(x))
        parts = [str(p) for p in path for p in (p if isinstance(p, tuple) else str(p).split("."))]
        numbered = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), max(len(parts) - 1, 1))
        key = () if one_unit else tuple(parts[:numbered])
        units[key] = units.get(key, 0) + math.prod(x.shape)
    return list(units.values())


def _count(leaves: Any) -> int:
    return sum(math.prod(x.shape) for x in {id(x): x for x in tree.leaves(leaves)}.values())


def _table(rows: Sequence[Estimate]) -> list[str]:
    names = [f.name for f in dataclasses.fields(Estimate) if f.name != "host" or any(row.host for row in rows)]
    lines = [names] + [[size(x) if isinstance(x, int) else x for x in (getattr(row, name) for name in names)]
                       for row in rows]  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return ["  ".join(x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
            .rstrip() for line in lines]  # fmt: skip

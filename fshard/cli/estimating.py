"""`python -m fshard estimate`: the memory of training a model, for each dtype and strategy, without any storage.

Sizes of parameters, gradients and optimizer state are exact, on the rank with the most: rank 0, by `fs.fully_shard`. To
these are added, for a dtype of `c` bytes:

    NO_SHARD             c for each parameter, if the dtype is not float32: the copies that are computed with
    SHARD_GRAD_OP        c for each parameter: all are gathered until backward has used them
    FULL_SHARD           c for each parameter of the two largest units: one is gathered while another computes
    a sharded strategy   c + 4 for each trained parameter of the largest unit: its gradients, and the sum over the ranks

A unit is a numbered block (`h.3`, `encoder.block.0`), and outside of blocks a module. Activations are not counted.
Source: Rajbhandari et al., 2020, "ZeRO": 16 bytes for each parameter with Adam in float32; Zhao et al., 2023, "PyTorch
FSDP", for the schedule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fshard import lora, optim, tree
from fshard.errors import fail, number_of
from fshard.interop.accelerate.settings import read_launched
from fshard.planning.search import rank_bytes
from fshard.planning.table import aligned
from fshard.schedule.strategy import STRATEGIES
from fshard.spec import P, fully_shard, size

from .inspecting import PATHS, Contents, cast_leaves, describe, read
from .planning import DTYPES

_OPTIMIZERS: dict[str, Callable[[float], optim.Optimizer]] = {"adamw": optim.adamw, "sgd": optim.sgd}
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def add(commands: Any) -> None:
    """Add `estimate` to the commands of a parser."""
    command = commands.add_parser(
        "estimate", help="print the memory of training a model, for each dtype and strategy",
        description="Print the bytes of parameters, gradients, optimizer state and gathered weights, on the rank with "
                    "the most, without activations (`plan` counts them). Only configs and headers are read.",
    )  # fmt: skip
    option = command.add_argument
    option("model", metavar="MODEL", help=f"{PATHS}; or the name of a class of transformers, with its default config")
    option("--strategy", nargs="+", metavar="NAME", type=_strategy, choices=STRATEGIES,
           help=f"of {', '.join(STRATEGIES)} (default: all that differ)")  # fmt: skip
    option("--ranks", type=int, metavar="N", help="ranks of all machines (default: 8)")
    option("--machines", type=int, metavar="N", help="machines, over which the hybrid strategies replicate")
    option("--dtypes", nargs="+", metavar="DTYPE", choices=DTYPES,
           help=f"to compute in: {', '.join(DTYPES)} (default: float32, bfloat16)")  # fmt: skip
    option("--optimizer", choices=_OPTIMIZERS, default="adamw")
    option("--lora", type=int, metavar="RANK",
           help="only adapters of this rank train; the rest is frozen, in the dtype")  # fmt: skip
    option("--targets", nargs="+", metavar="MODULE", help="modules to adapt, by their last parts: q_proj v_proj")
    option("--offload", action="store_true", help="parameters, gradients and optimizer state in host memory")
    option("--one_unit", "--one-unit", action="store_true", help="the model is one unit, as with NO_WRAP")
    option("--config_file", "--config-file", metavar="FILE", help="an Accelerate file, for what the options leave out")
    option("--json", action="store_true", help="print the numbers as JSON")
    command.set_defaults(run=_run)


def _strategy(name: str) -> str:
    name = name.upper()
    return next((s for s in STRATEGIES if s.lstrip("_") == name), name)


def _run(options: Any) -> str:
    if options.config_file:
        settings = read_launched(options.config_file, {})
        if settings.model > 1 or settings.reshard is not None:
            raise fail(f"estimate: {options.config_file} splits matrices over `model`, or keeps weights split over "
                       "`group`, which is not estimated", f"its axes are {settings.axes}",
                       fix="--ranks and --strategy, without --config_file")  # fmt: skip
        replicas = settings.axes.get("replica", settings.machines)
        dtype = str(settings.compute).removeprefix("torch.")
        of_file = {"strategy": [settings.strategy], "ranks": settings.processes, "machines": replicas,
                   "dtypes": [dtype], "offload": settings.offload, "one_unit": settings.wrap is None}  # fmt: skip
        for name, value in of_file.items():
            if getattr(options, name) is None or getattr(options, name) is False:
                setattr(options, name, value)
    ranks, machines = (default if n is None else n for n, default in ((options.ranks, 8), (options.machines, 1)))
    if ranks < 1 or machines < 1 or ranks % machines:
        raise fail(f"estimate: {ranks} ranks on {machines} machines", f"{ranks} % {machines} = {ranks % machines}"
                   if ranks > 0 and machines > 0 else "1 or more of each", fix="--ranks 8 --machines 2")  # fmt: skip
    contents = _contents(options.model)
    trained, frozen, others = _divided(contents, options.lora, options.targets)
    rows = [
        {"dtype": dtype, "strategy": strategy,
         **_estimate(trained, cast_leaves(frozen, DTYPES[dtype]), others, DTYPES[dtype].itemsize, strategy,
                     shards=1 if strategy == "NO_SHARD" else ranks // (machines if strategy in _HYBRID else 1),
                     optimizer=_OPTIMIZERS[options.optimizer](1e-3), offload=options.offload,
                     one_unit=options.one_unit)}
        for dtype in options.dtypes or ("float32", "bfloat16")
        for strategy in options.strategy or [s for s in STRATEGIES if machines > 1 or s not in _HYBRID]
    ]  # fmt: skip
    numbers = {"trained": sum(_units([trained], True)), "frozen": sum(_units([frozen], True)), "ranks": ranks,
               "machines": machines, "optimizer": options.optimizer}  # fmt: skip
    if options.json:
        return json.dumps({"model": options.model, **numbers, "rows": rows}, indent=2)
    counts = f"{numbers['trained']:,} parameters"
    if numbers["frozen"]:
        counts = f"{numbers['frozen']:,} frozen parameters, and {numbers['trained']:,} that train"
    where = number_of(ranks, "rank") + f" on {machines} machines" * (machines > 1)
    head = f"{counts}; {options.optimizer}; {where}; bytes of the rank with the most, without activations"
    names = [name for name in rows[0] if name != "host" or any(row["host"] for row in rows)]
    cells = [[size(row[name]) if isinstance(row[name], int) else row[name] for name in names] for row in rows]
    return "\n".join([f"{options.model}: {contents.source}", head, *aligned([names, *cells], [0, 1])])


def _contents(name: str) -> Contents:
    """Describe the model at a path, or a class of transformers with its default config."""
    if Path(name).exists() or not name.isidentifier():
        return read(name)
    try:
        import transformers
    except ImportError as e:
        raise fail(
            f"estimate: {name} is not a path, and transformers is not installed", fix="pip install transformers"
        ) from e
    made = getattr(transformers, name, None)
    config = getattr(made, "config_class", None)
    if not isinstance(made, type) or config is None:
        raise fail(f"estimate: {name} is neither a path nor a class of transformers that has a config",
                   fix=f"{PATHS}; or T5ForConditionalGeneration")  # fmt: skip
    return describe(name, lambda: made(config()), name)


def _divided(contents: Contents, rank: int | None, targets: Sequence[str] | None) -> tuple[Any, Any, Any]:
    """Return the leaves that train, the frozen ones and the others, which every rank has in full.

    Of a checkpoint only `params` train, of a module its parameters; with a rank of adapters only these.
    """
    leaves, buffers = contents.tree, {}
    if isinstance(leaves, dict) and "params" in leaves:
        leaves, buffers = leaves["params"], leaves.get("buffers", {})
    tensors = [(tree.dotted(path), x) for path, x in tree.leaves_with_path(leaves) if hasattr(x, "shape")]
    floating = {path: x for path, x in tensors if x.dtype.is_floating_point}
    others = [buffers, [x for path, x in tensors if path not in floating]]
    if not floating:
        raise fail("estimate: there are no parameters", fix="python -m fshard inspect shows the leaves")
    base = cast_leaves(floating, torch.float32)
    if (rank is None) != (not targets):
        given, fix = ("--targets", "--lora 8") if rank is None else ("--lora", "--targets q_proj v_proj")
        raise fail(f"estimate: {given} without {fix.split()[0]}", fix=fix)
    if rank is None:
        return base, {}, others
    return lora.init(lora.Config(targets=list(targets or ()), rank=rank), leaves, of=contents.names), base, others


def _estimate(
    trained: Any, frozen: Any, others: Any, width: int, strategy: str, *, shards: int, optimizer: optim.Optimizer,
    offload: bool, one_unit: bool,
) -> dict[str, int]:  # fmt: skip
    """Return the bytes of the rank with the most. What trains is stored in float32; `width` bytes are computed with.

    `working` are the gradients of one unit and the buffer of their sum.
    """
    axes = {"data": shards}
    specs, frozen_specs = (fully_shard(P(), x, axis="data") for x in (trained, frozen))
    gradients = rank_bytes(trained, specs, axes)
    parameters = gradients + rank_bytes(frozen, frozen_specs, axes) + rank_bytes(others, P(), axes)
    state = rank_bytes(optimizer.init(trained), optimizer.specs(specs), axes)
    units, of_trained = _units([trained, frozen], one_unit), _units([trained], one_unit)
    if shards > 1:
        two_units = strategy in ("FULL_SHARD", "HYBRID_SHARD")
        gathered = sum(sorted(units)[-2:] if two_units else units) * width
    else:  # what trains is used in its stored dtype, or cast; what is frozen is stored in the dtype
        gathered = sum(units if offload else of_trained) * width * (width != 4 or offload)
    working = max(of_trained, default=0) * (width + 4) if shards > 1 else 0
    stored = parameters + gradients + state
    return {"parameters": parameters, "gradients": gradients, "optimizer": state, "gathered": gathered,
            "working": working, "device": gathered + working + (0 if offload else stored),
            "host": stored if offload else 0}  # fmt: skip


def _units(trees: Sequence[Any], one_unit: bool) -> list[int]:
    """Return the number of parameters of each unit."""
    units: dict[Any, int] = {}
    seen: set[int] = set()
    for path, x in (row for t in trees for row in tree.leaves_with_path(t)):
        if id(x) in seen:
            continue
        seen.add(id(x))
        parts = tree.dotted(path).split(".")
        numbered = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), max(len(parts) - 1, 1))
        key = () if one_unit else tuple(parts[:numbered])
        units[key] = units.get(key, 0) + math.prod(x.shape)
    return list(units.values())

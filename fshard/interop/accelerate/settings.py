"""Settings of a run, from a file of `accelerate config`."""

from __future__ import annotations

import json
import math
import os
import warnings as python_warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fshard._core.files.io import StrPath
from fshard.errors import checked, fail

from .config_file import read_entries
from .keys import NO_SPLIT_MODULES, overrides, translate

FILE, KEYS_REPLACED = "FSHARD_CONFIG_FILE", "FSHARD_CONFIG_KEYS"  # the environment of launched ranks


@checked
@dataclass(frozen=True)
class Settings:
    """Settings of a run, as names and numbers: the ranks, the strategy, its schedule and the precision.

    Attributes: the ranks
        processes: of all machines together; None if the file leaves it to the command line.
        machines, machine_rank, address, port, rendezvous: as torchrun has them.
        cpu, gpus: whether ranks are on the CPU where there is a GPU; the GPUs of a machine, None for all of them.
        replicas, shards, model: sizes of the axes `replica`, `shard` or `data`, and `model`, as far as the file says.

    The strategy
        strategy: a name for `fs.strategy`: "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or
            "_HYBRID_SHARD_ZERO2".
        reshard: size of the groups within which weights stay split between forward and backward; None: `strategy` says
            it. The mesh then has an axis `group` of that size.
        wrap: the classes of the units; or the least number of parameters of one; "_no_split_modules", those that the
            model's class names; None: the model is one unit. See `units`.
        offload: parameters, gradients and optimizer state are in host memory.
        remat, offload_activations: units are recomputed in backward; their inputs are in host memory until then.
        backward_prefetch, forward_prefetch: the unit that is gathered ahead. See `strategy_options`.
        state_dict: the form of a saved state: "full", "sharded" or "local".

    The rest
        compute: dtype of the computation, for `fs.Policy(compute=)`; float16 needs an `fs.LossScale`.
        accumulate: microbatches of one step.
        compile, debug: for `shard_map(compile=)`, and `check="always"`.
        warnings: one line for each key of the file that means nothing here, or that Accelerate ignores.

    >>> Settings(strategy="HYBRID_SHARD", processes=8, machines=2).axes
    {'replica': 2, 'shard': 4}
    """

    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] = "NO_SHARD"
    processes: int | None = 1
    machines: int = 1
    machine_rank: int = 0
    address: str | None = None
    port: int | None = None
    rendezvous: str = "static"
    cpu: bool = False
    gpus: tuple[int, ...] | None = None
    replicas: int | None = None
    shards: int | None = None
    model: int = 1
    reshard: int | None = None
    wrap: tuple[str, ...] | int | str | None = None
    offload: bool = False
    remat: bool = False
    offload_activations: bool = False
    backward_prefetch: Literal["pre", "post"] | None = None
    forward_prefetch: bool = False
    state_dict: Literal["full", "sharded", "local"] = "full"
    compute: torch.dtype = torch.float32
    accumulate: int = 1
    compile: bool = False
    debug: bool = False
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = [f"{name}={value}" for name in ("processes", "machines", "model", "accumulate", "replicas", "shards")
                 if (value := getattr(self, name)) is not None and value < 1]  # fmt: skip
        if wrong:
            raise fail(f"Settings: {', '.join(wrong)}", fix="1 or more")
        if self.reshard is not None and self.reshard < 2:
            raise fail(f"Settings: reshard={self.reshard}", fix="a group of 2 ranks or more; or None")
        if self.wrap == () or (isinstance(self.wrap, int) and self.wrap < 1):
            raise fail(f"Settings: wrap={self.wrap}", fix="names of classes, or 1 or more parameters; or None")
        if isinstance(self.wrap, str) and self.wrap != NO_SPLIT_MODULES:
            raise fail(f"Settings: wrap={self.wrap!r}", fix=f"({self.wrap!r},) for a class, or {NO_SPLIT_MODULES!r}")
        _ = self.axes

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes of the mesh, for `fs.make_mesh(**settings.axes)`; a size of -1 is the rest of the world size.

        `data`; for the hybrid strategies `replica`, by default one for each machine, and `shard`; and `model`, if there
        is tensor parallelism.

        Raises ShardingError if the sizes do not make up the number of processes.
        """
        hybrid = self.strategy.removeprefix("_").startswith("HYBRID")
        first = {"replica": self.replicas or self.machines} if hybrid else {}
        last = {"group": self.reshard} if self.reshard is not None else {}
        if self.model > 1:
            last["model"] = self.model
        known = math.prod({**first, **last}.values())
        rest = -1 if self.processes is None else self.processes // known
        if self.shards is not None:
            rest = self.shards // (self.reshard or 1)
        axes = {**first, "shard" if hybrid else "data": rest, **last}
        if self.processes is not None and math.prod(axes.values()) != self.processes:
            raise fail(f"Settings: the axes do not make up {self.processes} processes",
                       f"{' x '.join(axes)} = {' x '.join(map(str, axes.values()))} = {math.prod(axes.values())}",
                       fix="num_processes, num_machines, fsdp_reshard_after_forward and parallelism_config must "
                           "fit", strategy=self.strategy, reshard=self.reshard)  # fmt: skip
        return axes

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Return the options of the strategy, for `fs.strategy(settings.strategy, **settings.strategy_options)`.

        `prefetch` and `backward_prefetch` are numbers of units, of `scan` and `Apply.unshard`, or "post".

        >>> Settings(strategy="FULL_SHARD", processes=8, reshard=4, backward_prefetch="pre").strategy_options
        {'prefetch': 0, 'backward_prefetch': 1, 'offload_params': False, 'axis': ('data', 'group'), 'release': 'group'}
        """
        backward = {"pre": 1, "post": "post", None: 0}[self.backward_prefetch]
        options = {"prefetch": int(self.forward_prefetch), "backward_prefetch": backward,
                   "offload_params": self.offload}  # fmt: skip
        if self.reshard is not None:
            first = tuple(axis for axis in self.axes if axis not in ("group", "model"))
            options |= {"axis": (*first, "group"), "release": "group"}
        return options

    @checked
    def units(self, model: Any = None) -> tuple[str, ...] | int | None:
        """Return the `units=` of `fs.defer`: `model`, a class or a module, has them if the file names no classes.

        >>> Settings(wrap=("T5Block",)).units()
        ('T5Block',)

        Raises ShardingError if the model is needed and names none.
        """
        if self.wrap != NO_SPLIT_MODULES:
            assert not isinstance(self.wrap, str)
            return self.wrap
        names = getattr(model, NO_SPLIT_MODULES, None)
        if not names:
            named = getattr(model, "__name__", type(model).__name__)
            what = "no model was given" if model is None else f"model is a {named}, which has none"
            raise fail("units: the file wraps the classes in the model's _no_split_modules", what,
                       fix="units(T5ForConditionalGeneration); or fsdp_transformer_layer_cls_to_wrap: T5Block in the "
                           "file")  # fmt: skip
        return tuple(sorted(names))


@checked
def read(path: StrPath, **keys: Any) -> Settings:
    """Return the settings of an Accelerate file, YAML (with the package pyyaml) or JSON.

    Each key is translated. One that means nothing here, or that Accelerate itself ignores, gives a warning, which
    `Settings.warnings` has too. `keys` replace keys of the file, by their names in it: `read(path, num_processes=4)`.
    A key that is missing has the value that `accelerate launch` gives it.

    >>> read("fsdp.yaml").axes, read("fsdp.yaml", num_processes=4, fsdp_sharding_strategy=2).strategy
    ({'data': 2}, 'SHARD_GRAD_OP')

    Raises ShardingError listing every key that is unknown, with the nearest one, or refused, and every value that its
    key does not have, by file and line.
    """
    if not os.fspath(path):
        raise fail("read: path is empty", fix="the file that `accelerate config` wrote")
    found = read_launched(path, keys)
    for text in found.warnings:
        python_warnings.warn(text, UserWarning, stacklevel=3)
    return found


def settings() -> Settings | None:
    """Return the settings that `python -m fshard launch` passes to its ranks by the environment, or None.

    They come from its `--config_file`, with the keys that its options replace. The launcher printed the warnings.

    >>> settings() is None                            # not started by `python -m fshard launch`
    True

    Raises ShardingError if the environment variable is not what the launcher wrote.
    """
    file, keys = os.environ.get(FILE), os.environ.get(KEYS_REPLACED)
    if not file and not keys:
        return None
    try:
        return read_launched(file, json.loads(keys or "{}"))
    except json.JSONDecodeError as e:
        raise fail(f"settings: the environment variable {KEYS_REPLACED} is not JSON", str(e),
                   fix=f"unset {KEYS_REPLACED}") from e  # fmt: skip


def read_launched(path: StrPath | None, keys: Mapping[str, Any]) -> Settings:
    """Return the settings of a file, if there is one, and of the keys that replace those in it; print no warning."""
    entries = read_entries(Path(path)) if path else {}
    return Settings(**translate({**entries, **overrides(keys)}, str(path or "the command line")))

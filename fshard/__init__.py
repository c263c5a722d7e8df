"""fshard: a JAX-style functional sharding library for PyTorch. The mesh never changes the answer."""

import typing

import torch

import fshard.errors as _errors

from . import checkpoint, data, init, interop, lora, models, nn, optim, planning, random, tree
from ._core.host_memory import to_device
from ._core.transfers import recording
from .collectives import (
    all_gather,
    all_to_all,
    all_to_all_rows,
    axis_index,
    axis_position,
    axis_size,
    global_shape,
    local_range,
    pmax,
    pmean,
    pmin,
    ppermute,
    pslice,
    psum,
    psum_scatter,
    pvary,
    take_rows,
)
from .data.script import gather_for_metrics, main_first, preempted, wait
from .defer import Apply, defer
from .errors import ShardingError
from .grad import accumulate, grad, value_and_grad
from .init import Deferred
from .interop import accelerate, peft, state_dict
from .law import check, print, validate, verify
from .lora import ia3
from .mesh import Mesh, make_mesh
from .models import hf
from .nn import decoding
from .optim.partition import combine, partition
from .optim.precision import LossScale, Policy, cast
from .optim.update import value_and_update
from .planning import Plan, devices, plan, plan_table, plot, trace
from .planning.show import show
from .random import fold_in, key, split
from .reshard import device_get, reshard
from .schedule.pipeline import on_stages, pipelined
from .schedule.remat import remat
from .schedule.scan import scan
from .schedule.strategy import Strategy, strategy
from .schedule.tables import schedule_table
from .schedule.unshard import unshard
from .shard_map import shard_map
from .sharded import Sharded, device_put, from_callback, materialize
from .spec import P, column, fully_shard, on_host, replicated, row, rules

__version__ = "0.1.0"

__all__ = [
    "Apply", "Deferred", "LossScale", "Mesh", "P", "Plan", "Policy", "Sharded", "ShardingError", "Strategy",
    "accelerate", "accumulate", "all_gather", "all_to_all", "all_to_all_rows", "axis_index", "axis_position",
    "axis_size", "cast", "check", "checkpoint", "column", "combine", "data", "decoding", "defer", "device_get",
    "device_put", "devices", "fold_in", "from_callback", "fully_shard", "gather_for_metrics", "global_shape", "grad",
    "hf", "ia3", "init", "interop", "key", "local_range", "lora", "main_first", "make_mesh", "materialize", "models",
    "nn", "on_host", "on_stages", "optim", "partition", "peft", "pipelined", "plan", "plan_table", "planning", "plot",
    "pmax", "pmean", "pmin", "ppermute", "preempted", "print", "pslice", "psum", "psum_scatter", "pvary", "random",
    "recording", "remat", "replicated", "reshard", "row", "rules", "scan", "schedule_table", "shard_map", "show",
    "split", "state_dict", "strategy", "take_rows", "to_device", "trace", "tree", "unshard", "validate",
    "value_and_grad", "value_and_update", "verify", "wait",
]  # fmt: skip

# Names of JAX and torch, and the names here.
_NAMES_ELSEWHERE = {
    "DTensor": "fs.Sharded", "DistributedDataParallel": "fs.unshard, with P() as specs", "NamedSharding": "fs.P",
    "FullyShardedDataParallel": "fs.unshard, with fs.fully_shard(specs, tree, axis=) as specs", "PartitionSpec": "fs.P",
    "all_reduce": "fs.psum", "compile": "fs.shard_map(f, ..., compile=True)", "checkpoint_wrapper": "fs.remat",
    "distribute_tensor": "fs.device_put", "init_device_mesh": "fs.make_mesh", "jit": "fs.shard_map", "lax": "fs itself",
    "jnp": "torch", "PRNGKey": "fs.key", "ShapeDtypeStruct": "fs.Deferred", "eval_shape": "fs.check", "tree_leaves":
    "fs.tree.leaves", "process_index": "mesh.is_first, or torch.distributed.get_rank()", "pcast": "fs.pvary",
    "load": "fs.checkpoint.restore", "numpy": "torch", "pmap": "fs.shard_map", "reduce_scatter": "fs.psum_scatter",
    "save": "fs.checkpoint.save", "tree_map": "fs.tree.map", "tree_util": "fs.tree",
    "with_sharding_constraint": "fs.reshard, outside of fs.shard_map",
}  # fmt: skip
if not typing.TYPE_CHECKING:
    __getattr__ = _errors.other_names(__name__, _NAMES_ELSEWHERE, torch, torch.func)


def __dir__() -> list[str]:
    """Return only the public names, which a notebook completes."""
    return sorted([*__all__, "__version__"])

"""fshard: a JAX-style functional sharding library for PyTorch. The mesh never changes the answer."""

from . import checkpoint, data, init, interop, models, nn, optim, random, tree
from .check import check
from .collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    pslice,
    psum,
    psum_scatter,
    pvary,
)
from .comm import recording
from .deferred import Deferred
from .display import show
from .errors import ShardingError
from .interop import hf
from .interop.module import defer
from .keys import fold_in, key, split
from .memory import to_device
from .mesh import Mesh, make_mesh
from .precision import LossScale, Policy, cast
from .remat import remat
from .reshard import device_get, reshard
from .scan import scan
from .shard_map import shard_map
from .sharded import Sharded, device_put, from_callback, materialize
from .spec import P, column, fully_shard, on_host, replicated, row, rules
from .transforms import accumulate, grad, value_and_grad
from .unshard import unshard
from .validate import validate
from .verify import verify

__all__ = [
    "Deferred", "LossScale", "Mesh", "P", "Policy", "Sharded", "ShardingError", "accumulate", "all_gather",
    "all_to_all", "axis_index", "axis_size", "cast", "check", "checkpoint", "column", "data", "defer", "device_get",
    "device_put", "fold_in", "from_callback", "fully_shard", "grad", "hf", "init", "interop", "key", "make_mesh",
    "materialize", "models", "nn", "on_host", "optim", "pmax", "pmean", "pmin", "ppermute", "pslice", "psum",
    "psum_scatter", "pvary", "random", "recording", "remat", "replicated", "reshard", "row", "rules", "scan",
    "shard_map", "show", "split", "to_device", "tree", "unshard", "validate", "value_and_grad", "verify",
]  # fmt: skip

"""Differentiable collectives: linear maps with their transposes, and the autograd Function that applies them."""

from .autograd import apply_function, apply_map, differentiable_dtype, make_functions, run_map, start_map
from .dim_sizes import (
    argument_shape,
    argument_specs,
    checked_size,
    described_size,
    dim_of,
    gather_layout,
    global_shape,
    global_size,
    keep_placed,
    known_sizes,
    local_range,
    own_range,
    split_layout,
)
from .linear_maps import (
    AllToAll,
    AllToAllRows,
    CastMap,
    Counts,
    Gather,
    GatherInvariant,
    Map,
    Permute,
    Precision,
    Scatter,
    Slice,
    Sum,
    Vary,
)
from .minmax import minmax
from .rows import check_counts, check_types, evenly, exchange_padded, exchange_rows, host_numbers, row_counts, tally

__all__ = [
    "AllToAll", "AllToAllRows", "CastMap", "Counts", "Gather", "GatherInvariant", "Map", "Permute", "Precision",
    "Scatter", "Slice", "Sum", "Vary", "apply_function", "apply_map", "argument_shape", "argument_specs",
    "check_counts", "check_types", "checked_size", "described_size", "differentiable_dtype", "dim_of", "evenly",
    "exchange_padded", "exchange_rows", "gather_layout", "global_shape", "global_size", "host_numbers", "keep_placed",
    "known_sizes", "local_range", "make_functions", "minmax", "own_range", "row_counts", "run_map", "split_layout",
    "start_map", "tally",
]  # fmt: skip

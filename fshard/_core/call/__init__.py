"""Parts of one `shard_map` call: plans of its arguments and results, the code to check, the context of its ranks."""

from .arguments import CallPlan, argument_names, call_signature, donated_leaves, make_plan, slice_inputs
from .context import compiled, explain_missing_values, explain_shapes, force_eager
from .program import Program, read_program
from .results import (
    RankResult,
    broadcast_out_specs,
    compare_result_types,
    exchange_result_types,
    flatten_result,
    join_results,
    refuse_valueless,
    result_types,
    storage_pointers,
)

__all__ = [
    "CallPlan", "Program", "RankResult", "argument_names", "broadcast_out_specs", "call_signature",
    "compare_result_types", "compiled", "donated_leaves", "exchange_result_types", "explain_missing_values",
    "explain_shapes", "flatten_result", "force_eager", "join_results", "make_plan", "read_program", "refuse_valueless",
    "result_types", "slice_inputs", "storage_pointers",
]  # fmt: skip

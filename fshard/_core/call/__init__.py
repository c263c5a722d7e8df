"""Parts of one `shard_map` call: plans of its arguments and results, the code to check, the context of its ranks."""

from .arguments import argument_names, call_signature, make_plan, note_written, prepare, slice_inputs
from .context import compiled, explain_missing_values, explain_shapes, force_eager
from .plan import CallPlan, RankResult
from .program import Program, read_program
from .ranks import is_settled, run_groups
from .results import (
    broadcast_out_specs,
    compare_result_types,
    exchange_result_types,
    finish,
    flatten_result,
    refuse_valueless,
    result_types,
    storage_pointers,
)

__all__ = [
    "CallPlan", "Program", "RankResult", "argument_names", "broadcast_out_specs", "call_signature",
    "compare_result_types", "compiled", "exchange_result_types", "explain_missing_values", "explain_shapes", "finish",
    "flatten_result", "force_eager", "is_settled", "make_plan", "note_written", "prepare",
    "read_program", "refuse_valueless", "result_types", "run_groups", "slice_inputs", "storage_pointers",
]  # fmt: skip

"""Communication: the protocol that moves tensors between ranks, its three implementations, and the region of a call.

`protocol` is the interface for the rest of fshard. `process` implements it over torch.distributed, `simulated` with
threads, and `abstract` with shapes alone. Nothing outside this package depends on which of the three a mesh uses.
"""

from fshard._torch_compat import is_view
from fshard.spec import Axis

from .abstract import AbstractComm, fake_tensors, run_on_meta
from .functional import call_distributed
from .gloo import GlooConnections
from .host_memory import (
    HOST,
    common_device,
    copy_to_device,
    empty_part,
    host_device,
    memory_device,
    start_copy_to_device,
    start_copy_to_host,
    to_device,
    to_spec_memory,
    wait_before_writing,
    wait_for_copies_to_host,
)
from .meeting import OTHER_PORT
from .microbatch import Microbatch, flattened_rows, in_microbatch, microbatch, microbatches
from .packing import join_padded, longest_part, pack, pad, split_padded, unpack
from .planned import PlannedComm
from .preemption import StopAgreement, handle_signals, stop_agreement, take_signal
from .process import ProcessComm
from .protocol import Comm, PendingTransfer, coords_of, index_of, ranks_over, size_of
from .record import (
    Recording,
    Transfer,
    call_site,
    is_observed,
    is_recomputing,
    recomputing,
    recording,
    refuse_tracing,
    stop_after_transfers,
    transfer_count,
    transfer_rows,
    transfer_table,
    transposing,
)
from .region import (
    Region,
    UnevenSize,
    axes_of_own_values,
    bind,
    checker,
    device_type,
    has_values,
    in_region,
    is_scheduled,
    known_axes,
    live_axes,
    mark_arguments,
    refuse_nesting,
    refuse_transfer,
    region,
    storage_key,
    user_line,
    without_others,
)
from .simulated import simulate
from .timed import TimedComm, Watch
from .watchdog import SLOW, Wait, Watchdog, call_at_exit, start_watchdog

__all__ = [
    "HOST", "OTHER_PORT", "SLOW", "AbstractComm", "Axis", "Comm", "GlooConnections", "Microbatch", "PendingTransfer",
    "PlannedComm", "ProcessComm", "Recording", "Region", "StopAgreement", "TimedComm", "Transfer", "UnevenSize", "Wait",
    "Watch", "Watchdog", "axes_of_own_values", "bind", "call_at_exit", "call_distributed", "call_site", "checker",
    "common_device", "coords_of", "copy_to_device", "device_type", "empty_part", "fake_tensors", "flattened_rows",
    "handle_signals", "has_values", "host_device", "in_microbatch", "in_region", "index_of", "is_observed",
    "is_recomputing", "is_scheduled", "is_view", "join_padded", "known_axes", "live_axes", "longest_part",
    "mark_arguments", "memory_device", "microbatch", "microbatches", "pack", "pad", "ranks_over", "recomputing",
    "recording", "refuse_nesting", "refuse_tracing", "refuse_transfer", "region", "run_on_meta", "simulate", "size_of",
    "split_padded", "start_copy_to_device", "start_copy_to_host", "start_watchdog", "stop_after_transfers",
    "stop_agreement", "storage_key", "take_signal", "to_device", "to_spec_memory", "transfer_count", "transfer_rows",
    "transfer_table", "transposing", "unpack", "user_line", "wait_before_writing", "wait_for_copies_to_host",
    "without_others",
]  # fmt: skip

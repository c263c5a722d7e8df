"""Communication over one or more mesh axes: the comms of processes, of threads and of shapes, and their parts.

`fshard._core.protocol` is their interface. `process` implements it over torch.distributed, `simulated` with threads,
and `abstract` with shapes only. Nothing outside this package, but `mesh`, depends on which of the three a mesh uses.
"""

from .abstract import AbstractComm, fake_tensors, run_on_meta, silent_comm
from .functional import call_distributed
from .gloo import GlooConnections
from .group import TimedComm, Watch
from .meeting import OTHER_PORT
from .preemption import handle_signals, stop_agreement, take_signal
from .process import ProcessComm
from .simulated import simulate
from .watchdog import SLOW, Wait, Watchdog, call_at_exit, start_watchdog

__all__ = [
    "OTHER_PORT", "SLOW", "AbstractComm", "GlooConnections", "ProcessComm", "TimedComm", "Wait", "Watch",
    "Watchdog", "call_at_exit", "call_distributed", "fake_tensors", "handle_signals", "run_on_meta", "silent_comm",
    "simulate", "start_watchdog", "stop_agreement", "take_signal",
]  # fmt: skip

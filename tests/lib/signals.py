"""Signals, in tests: handlers that a test installs end with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from fshard._core.comm import preemption


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Restore the handlers at the end, and forget the signals that arrived. Also a decorator."""
    before, process = {number: signal.getsignal(number) for number in preemption.SIGNALS}, preemption._process
    preemption._process = preemption._Process()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have set to be ignored
    try:
        yield
    finally:
        preemption._process = process
        for number, handler in before.items():
            if handler is not None:  # as that of faulthandler, which Python does not know
                signal.signal(number, handler)

"""A stop that a signal asks for, agreed over all ranks. Until a signal arrives, no rank sends anything.

1. The rank that gets the signal sets a key for every rank, in the store that the ranks met in.
2. A thread of each rank waits for its key. It publishes n, the number of the program's next call of `reached`. The last
   rank to publish also publishes the largest n, as the end.
3. Call n waits for the end, some milliseconds. The program goes on to the call with the number of the end.

So all ranks stop at the same call, although they learn of the signal at different moments.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fshard._core.torch import default_store
from fshard.errors import fail

from .watchdog import SLOW, Wait, run_at_exit

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]

_FOREVER = datetime.timedelta(days=1000)
_ANSWER = datetime.timedelta(seconds=20)  # less than the 30 s between SIGTERM and SIGKILL of torchrun and Kubernetes


class StopAgreement:
    """The part of one rank in an agreement to stop. `store` must have no keys of another agreement."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._calls = 0
        self._pause = self._end = math.inf  # the call that waits for the end, and the end
        self._lock = threading.Lock()  # guards the calls and the pause
        self._decided = threading.Event()
        self._closed = False
        self._missing: list[int] = []  # ranks that do not answer
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._answer, args=(store.clone(),), daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Ask all ranks to stop. If the store is gone, the next call of `reached` raises."""
        try:
            self._store.multi_set([f"asked/{r}" for r in range(self._world)], ["1"] * self._world)
        except RuntimeError as e:
            self._error, self._pause = e, 0

    def reached(self) -> bool:
        """Count one call, and return whether the ranks stop at this call, or at an earlier one.

        Raises ShardingError if a rank does not answer.
        """
        with self._lock:
            self._calls += 1
            if self._calls < self._pause:
                return False
        if self._error is None:
            with Wait(lambda: ("for other ranks to agree on the step at which to stop", f"one of them {SLOW}")):
                self._decided.wait()
        if self._error is not None:
            ranks = f"no answer from ranks {self._missing} in {_ANSWER.seconds} s" if self._missing else ""
            raise fail("preempted: the ranks were asked to stop, and do not agree on a step",
                       ranks or str(self._error), fix="see the output of the other ranks") from self._error  # fmt: skip
        return self._calls >= self._end

    def close(self) -> None:
        """Publish the last call and end the thread: other ranks may still be asked to stop at an earlier call."""
        self._closed = True
        with contextlib.suppress(RuntimeError):
            self._store.set(f"asked/{self._rank}", "1")
        self._thread.join(_ANSWER.seconds)

    def _answer(self, store: Any) -> None:
        calls = [f"call/{r}" for r in range(self._world)]
        try:
            store.wait([f"asked/{self._rank}"], _FOREVER)
            with self._lock:
                self._pause = self._calls + 1
            store.set(calls[self._rank], str(self._pause))
            if store.add("answers", 1) == self._world:
                store.set("end", str(max(map(int, store.multi_get(calls)))))
            if not self._closed:
                try:
                    store.wait(["end"], _ANSWER)
                except RuntimeError:
                    self._missing = [r for r, call in enumerate(calls) if not store.check([call])]
                    raise
                self._end = int(store.get("end"))
        except RuntimeError as e:
            self._error = e
        finally:
            self._decided.set()


# --- signals of this process ------------------------------------------------------------------------------------------


class _Process:
    """The signals that this process received, and the agreement of its ranks."""

    def __init__(self) -> None:
        self.pid = 0  # of the process that calls `handle_signals`
        self.former: dict[int, Any] = {}  # handlers, by signal
        self.received: int = 0  # the first signal that arrived
        self.store: Any = None
        self.agreement: StopAgreement | None = None

    def handle(self, number: int, frame: Any) -> None:
        former = self.former[number]
        if os.getpid() != self.pid:  # a forked child, for example a worker of a DataLoader
            signal.signal(number, former)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            signal.signal(number, former)  # the second one interrupts at once
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"fshard: Ctrl-C: the program stops after this step. Press it again to stop now.\n")
        self.received = self.received or number
        if self.agreement is not None:
            self.agreement.ask()
        if callable(former) and former is not signal.default_int_handler:
            former(number, frame)


_process = _Process()


def handle_signals() -> None:
    """Handle SIGTERM, SIGUSR1 and the next SIGINT, unless a signal is ignored, or handled by another language.

    Raises ValueError if handlers must be installed, and this is not the main thread.
    """
    if _process.pid != os.getpid():  # the first call here, or after a fork
        _process.pid, _process.received, _process.agreement = os.getpid(), 0, None
    for number in SIGNALS if not _process.received else ():
        former = signal.getsignal(number)
        if former not in (None, signal.SIG_IGN, _process.handle):
            signal.signal(number, _process.handle)
            _process.former[number] = former


def take_signal() -> bool:
    """Return whether a signal arrived. Ctrl-C ends one loop, not the session: it is reported once."""
    received = _process.received
    if received == signal.SIGINT:
        _process.received = 0
    return bool(received)


def stop_agreement(rank: int, world: int, share: Callable[[str], str]) -> StopAgreement:
    """Return the agreement of the process group of all ranks, made at the first call.

    `share` returns the text of rank 0 on every rank. A store may have keys of a job before this one, which torchrun
    started again; so each agreement has a prefix that no other has.
    """
    store = default_store()
    if _process.agreement is None or _process.store is not store:
        prefix = share(f"fshard/stop/{os.urandom(8).hex()}")
        _process.store = store
        agreement = _process.agreement = StopAgreement(dist.distributed_c10d.PrefixStore(prefix, store), rank, world)
        run_at_exit(agreement.close)
        if _process.received:
            agreement.ask()
    return _process.agreement

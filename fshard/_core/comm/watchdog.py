"""A thread of each rank that ends the process when another rank or the launcher has failed, and reports long waits.

    rank 1 ---+
    rank 2 ---+--- rank 0     a TCP connection from each rank to rank 0; with agents, from one rank of each machine
    rank 3 ---+

The kernel closes the connections of a process that ends, whatever has ended it, and rank 0 reports that to the other
ranks. A rank whose program ends sends a message first. Nothing is sent meanwhile: a rank that is stopped, that compiles
or that is in a debugger has not failed. Keepalive probes find a lost host within two minutes. An agent of torchrun ends
all ranks of its machine when one fails, and does not notice that the ranks of another machine have failed.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import math
import multiprocessing.util
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from fshard._core import callsite

from .meeting import accept, announce, connect

_POLL = 1.0  # seconds between two looks at the launcher and at the waits
_GRACE = 10.0  # seconds for a rank to raise an error, which explains more, after another one has failed
_LONG_WAIT = 30.0  # seconds of one wait, after which it is reported
_LEAVE = datetime.timedelta(seconds=5)  # of a wait at the end for other ranks, which may hang
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 120_000}

SLOW = "may be compiling, saving, slow, stopped, in a debugger, or may not make this call"  # reason of a long wait

_NUMBER = struct.Struct("!I")  # from rank 0: a rank that has failed
_LEFT = _NUMBER.pack(2**32 - 1)  # the sender leaves


def end_process(reason: str) -> None:
    """Print the reason to stderr, flush the output of the program, and end the process with status 1.

    The main thread may be blocked in C++, where no exception reaches it, so its `finally` blocks do not run. It may
    also hold the lock of a stream whose reader is blocked, so no flush is waited for longer than a second.
    """

    def flush() -> None:
        with contextlib.suppress(Exception):
            report(reason)
            sys.stdout.flush()

    try:
        flushing = threading.Thread(target=flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
    except RuntimeError:  # at the end of the program Python starts no threads
        flush()
    os._exit(1)


def report(text: str) -> None:
    """Print a line to stderr."""
    sys.stderr.write(f"fshard: {text}\n")
    sys.stderr.flush()


class Watchdog:
    """The connections of one rank to the others, and the thread that watches them, the launcher and the waits.

    `end` and `report` are called with a text. `launcher` is the id of the parent process that must live, if any;
    `stays` is whether this rank stays connected.
    """

    def __init__(
        self, rank: int, world: int, *, launcher: int | None = None, stays: bool = True,
        end: Callable[[str], None] = end_process, report: Callable[[str], None] = report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.rank, self.world = rank, world
        self.failed: int | None = None  # the first rank that is known to have failed
        self._launcher, self._end, self._report, self._clock = launcher, end, report, clock
        self._stays, self._end_at = stays, math.inf
        self._is_leaving = False
        self._reported: set[float] = set()  # starts of the waits that were reported
        self._closed = False
        self._changed = threading.Condition()  # guards all of these, and wakes the main thread
        self._token = b""
        self._store: Any = None  # of this attempt
        self._starts = 0  # of torch.distributed in this process
        self._listener: socket.socket | None = None
        self._known: set[int] = set()  # ranks that rank 0 has accepted
        self._left: set[int] = set()  # ranks that sent so
        self._connections: dict[socket.socket, int] = {}  # with the rank at the other end
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Start the thread. Forked children have neither the thread nor the connections."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._run, name="fshard watchdog", daemon=True).start()

    # --- connections ----------------------------------------------------------------------------------------------

    def meet(self, store: Any, host: str, port: str) -> PrefixStore:
        """Meet rank 0, which has the store at `host:port`; return the part of the store for this attempt.

        Raises ShardingError if rank 0 is of another job.
        """
        if not self._token and self.rank == 0:
            self._listener, self._token = announce(store, host, self.world)
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif not self._token:
            connection, self._token = connect(store, host, port, self.rank, self.world)
            self.add(connection, 0)
            if not self._stays:
                self._send(_LEFT, connection)
                self._drop(connection)
        self._starts += 1
        self._store = out = PrefixStore(f"{self._token.hex()}/{self._starts}", store)
        return out

    def add(self, connection: socket.socket, rank: int) -> None:
        """Watch a connection with another rank."""
        connection.settimeout(None)
        with contextlib.suppress(OSError):  # of a kind of socket that has no such options
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._changed:
            if self._closed:  # by the main thread, while this one accepted
                connection.close()
                return
            self._connections[connection] = rank
            self._selector.register(connection, selectors.EVENT_READ)
            if self.rank == 0 and self.failed is not None:  # this rank connects late
                self._send(_NUMBER.pack(self.failed), connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted = accept(self._listener, self._token, self.world, self._known)
        except OSError as e:
            self._end(f"rank 0 cannot have a connection from each of {self.world} ranks ({e.strerror}): "
                      "raise its number of open files (ulimit -n)")  # fmt: skip
        else:
            if accepted is not None:
                self.add(*accepted)

    def _receive(self, connection: socket.socket) -> None:
        """Read one message, or the end of the connection: the failure of a rank that has not left."""
        try:
            message = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        except OSError:  # reset, or no answer to the keepalive probes
            message = b""
        with self._changed:
            if connection not in self._connections:  # closed by the main thread
                return
            rank = self._connections[connection]
            if message == _LEFT:
                self._left.add(rank)
            elif len(message) < _NUMBER.size:
                self._drop(connection)
                if rank not in self._left:
                    self._note_failure(rank)
            elif rank == 0 and (failed := _NUMBER.unpack(message)[0]) < self.world:
                self._note_failure(failed)
            self._changed.notify_all()

    def _drop(self, *connections: socket.socket) -> None:
        for connection in connections:
            del self._connections[connection]
            self._selector.unregister(connection)
            connection.close()

    def _note_failure(self, rank: int) -> None:
        if self.failed is None:
            self.failed, self._end_at = rank, self._clock() + _GRACE
            if self.rank == 0:
                self._send(_NUMBER.pack(rank), *self._connections)

    def _send(self, message: bytes, *connections: socket.socket) -> None:
        for connection in connections:
            with contextlib.suppress(OSError):  # its end is read next
                connection.sendall(message)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self.step(_POLL)

    def step(self, timeout: float) -> None:
        """Read messages for at most `timeout` seconds, then look for a reason to end and for long waits."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._receive(key.fileobj)
        with self._changed:
            reason = "" if self._closed else self._reason_to_end()
        if reason:
            self._end(reason)
        for text in self._long_waits():
            self._report(text)

    def _reason_to_end(self) -> str:
        if self._launcher is not None and os.getppid() != self._launcher:
            return f"rank {self.rank} ends, since its launcher (process {self._launcher}) has ended"
        late = self._clock() >= self._end_at
        if self.failed == self.rank:
            return f"rank {self.rank} has failed, and had not ended {_GRACE:.0f} s later" if late else ""
        # A rank that leaves has no error to wait for.
        if self.failed is not None and (late or self._is_leaving):
            # The agent of a machine ends all of its ranks when one fails.
            which = f"rank {self.failed}" + " or another rank of its machine" * (self._launcher is not None)
            return (f"rank {self.rank} ends, since {which} has failed: it raised, was killed, called os._exit, or its "
                    f"host was lost; see the output of rank {self.failed}")  # fmt: skip
        return ""

    def _long_waits(self) -> list[str]:
        """Texts for the waits that have become long since the last call."""
        now, waits, texts = self._clock(), dict(_waits), []
        self._reported &= {start for start, _ in waits.values()}
        for thread, (start, describe) in waits.items():
            if now - start >= _LONG_WAIT and start not in self._reported:
                self._reported.add(start)
                frame = callsite.user_frame(sys._current_frames().get(thread))
                where = f", called at {callsite.site(frame)}" if frame else ""
                waited, reason = describe()
                texts.append(f"rank {self.rank} has waited {now - start:.0f} s {waited}{where}: {reason}")
        return texts

    # --- the end --------------------------------------------------------------------------------------------------

    def leave(self, *, failed: bool) -> None:
        """Leave, when all other ranks do or 5 s later; a rank that has failed does not wait."""
        with self._changed:
            if self._closed:
                return
            if failed:
                self.failed, self._end_at = self.rank, self._clock() + _GRACE
                self._drop(*self._connections)
                return
            self._is_leaving = True
        with contextlib.suppress(Exception):  # of a store that has gone, or of a wait that was too long
            if self._store.add("left", 1) < self.world:
                self._store.wait(["all left"], _LEAVE)
            else:
                self._store.set("all left", "")
            self._left.update(range(self.world))
        with self._changed:  # after the wait, in which an agent ends this rank if another one of the machine has failed
            self._send(_LEFT, *self._connections)
            self._closed = self.rank != 0 and self.failed is None  # what fails from now on does not end this rank

    def close(self) -> None:
        """End the thread and close the connections. A rank 0 that has not failed first waits until all others have."""
        with self._changed:
            if self.rank == 0 and self._is_leaving:
                with Wait(lambda: (f"at its end for ranks {sorted(self._connections.values())} to end",
                                   "it reports failures to them, and may have the store that they use")):  # fmt: skip
                    self._changed.wait_for(lambda: not self._connections)
            self._closed = True
            self._drop(*self._connections)

    def _forget(self) -> None:
        """Close the sockets of this process in a forked child, where they would outlive it."""
        self._closed = True
        self._selector.close()
        for s in (*self._connections, *filter(None, [self._listener])):
            s.close()
        _waits.clear()
        start_watchdog.cache_clear()


@functools.cache
def start_watchdog(rank: int, world: int) -> Watchdog:
    """Return the watchdog of this process, which is started at the first call."""
    launcher = launcher_id()
    out = Watchdog(rank, world, launcher=launcher, stays=launcher is None or os.environ.get("LOCAL_RANK") == "0")
    out.start()
    return out


def launcher_id() -> int | None:
    """Return the process id of the agent of torchrun that started this process; `None` without an agent."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def call_at_exit(leave: Callable[[bool], None], fail: Callable[[], None]) -> None:
    """Call `leave(failed)` when the program ends, after its threads; and `fail()` before that if an exception ends it.

    `sys.exit` is not a failure, with any status: ranks may agree on one. An exception at an interactive prompt ends
    nothing.
    """
    before, pid, print_exception = getattr(sys, "last_value", None), os.getpid(), sys.excepthook

    def excepthook(*exception: Any) -> None:
        print_exception(*exception)
        if os.getpid() == pid and not _is_interactive():
            fail()

    def at_exit() -> None:
        if os.getpid() != pid:  # a forked child
            return
        e = sys.exc_info()[1]
        raising = not isinstance(e, SystemExit | None)
        leave(raising or (getattr(sys, "last_value", None) is not before and not _is_interactive()))

    sys.excepthook = excepthook
    run_at_exit(at_exit)


def run_at_exit(f: Callable[[], None]) -> None:
    """Call `f` when the program ends, after its threads."""
    if multiprocessing.parent_process() is None:
        atexit.register(f)
    else:  # such a process may end by os._exit, after its finalizers
        multiprocessing.util.Finalize(None, f, exitpriority=0)


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


# --- waits ------------------------------------------------------------------------------------------------------------

Describe = Callable[[], tuple[str, str]]  # returns the words after "has waited 30 s", and a reason

_waits: dict[int, tuple[float, Describe]] = {}  # by thread, with their starts


class Wait:
    """Context in which this thread waits for other ranks. `describe` is called once, if the wait becomes long."""

    __slots__ = ("describe",)

    def __init__(self, describe: Describe) -> None:
        self.describe = describe

    def __enter__(self) -> None:
        _waits[threading.get_ident()] = (time.monotonic(), self.describe)

    def __exit__(self, *_: object) -> None:
        _waits.pop(threading.get_ident(), None)

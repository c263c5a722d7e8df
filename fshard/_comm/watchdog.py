"""A thread of each rank that ends the process when another rank or the launcher has failed, and reports long waits.

    rank 1 ---+
    rank 2 ---+--- rank 0     one TCP connection from each rank to rank 0, open until the rank leaves
    rank 3 ---+

The kernel closes the connections of a process that ends, whatever has ended it, and rank 0 tells the other ranks. A
rank whose program ends says so first. Nothing is sent meanwhile: a rank that is stopped, that compiles or that is in a
debugger has not failed. Keepalive probes find a lost host within two minutes.
"""

from __future__ import annotations

import atexit
import contextlib
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

from fshard import _callsite

_POLL = 1.0  # seconds between two looks at the launcher and at the waits
_GRACE = 10.0  # seconds for a rank to end by an error of its own, which says more, after another one has failed
_LONG_WAIT = 30.0  # seconds of one wait, after which it is reported
_LEAVE = 5.0  # seconds that a rank waits at its end for the others: none waits long for one that hangs
_CONNECT = 20.0  # seconds to connect to rank 0, whose host has answered before
_HELLO_TIMEOUT = 5.0  # seconds for a connected rank to say which it is
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 120_000}

SLOW = "may be compiling, saving, slow, stopped or in a debugger"  # reason of a long wait

_KEY = "fshard/watchdog"  # in the store: port of rank 0, and a token that tells its ranks from strangers
_MESSAGE = struct.Struct("!cI")  # a kind, and the rank it is about
_HELLO, _LEFT, _FAILED, _ALL_LEFT = b"H", b"L", b"F", b"A"


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
    `has_store` says that rank 0 has the store, and not the launcher.
    """

    def __init__(
        self, rank: int, world: int, *, launcher: int | None = None, has_store: bool = True,
        end: Callable[[str], None] = end_process, report: Callable[[str], None] = report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.rank, self.world = rank, world
        self.failed: int | None = None  # the first rank that is known to have failed
        self._launcher, self._end, self._report, self._clock = launcher, end, report, clock
        self._is_needed = rank == 0 and has_store
        self._end_at = math.inf
        self._left: set[int] = set()
        self._reported: set[float] = set()  # starts of the waits that were reported
        self._closed = False
        self._changed = threading.Condition()  # guards all of these, and wakes the main thread
        self._token = b""
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, int] = {}  # with the rank at the other end
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Start the thread. Forked children have neither the thread nor the connections."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._run, name="fshard watchdog", daemon=True).start()

    # --- connections ----------------------------------------------------------------------------------------------

    def connect(self, store: Any, host: str) -> None:
        """Connect to rank 0, which the other ranks reach at `host`; on rank 0 accept connections from now on."""
        if self.world == 1 or self._listener or self._connections:
            return
        if self.rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=self.world)
            self._token = os.urandom(16)
            self._selector.register(self._listener, selectors.EVENT_READ)
            store.set(_KEY, f"{self._listener.getsockname()[1]} {self._token.hex()}")
            return
        port, token = store.get(_KEY).decode().split()
        try:
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT)
            connection.sendall(bytes.fromhex(token) + _MESSAGE.pack(_HELLO, self.rank))
        except OSError as e:
            self._report(f"rank {self.rank} cannot connect to port {port} of {host}, the host of rank 0 ({e}): "
                         "if another rank fails, this one may wait for it until the timeout")  # fmt: skip
            return
        self.add(connection, 0)

    def add(self, connection: socket.socket, rank: int) -> None:
        """Watch a connection with another rank."""
        connection.settimeout(None)
        with contextlib.suppress(OSError):  # of a kind of socket that has no such options
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._changed:
            self._connections[connection] = rank
            self._selector.register(connection, selectors.EVENT_READ)
            if self.rank == 0:  # this rank may connect late
                for r in self._left:
                    self._send(connection, _LEFT, r)
                if self.failed is not None:
                    self._send(connection, _FAILED, self.failed)

    def _accept(self) -> None:
        assert self._listener is not None
        size = len(self._token) + _MESSAGE.size
        with contextlib.suppress(OSError):  # of one that has gone, or of a stranger who says nothing
            connection, _ = self._listener.accept()
            connection.settimeout(_HELLO_TIMEOUT)
            with contextlib.closing(connection):
                data = connection.recv(size, socket.MSG_WAITALL)
                if len(data) == size and data.startswith(self._token):
                    _, rank = _MESSAGE.unpack(data[len(self._token) :])
                    self.add(connection.dup(), rank)

    def _receive(self, connection: socket.socket) -> None:
        """Read one message, or the end of the connection: the failure of a rank that has not left."""
        try:
            data = connection.recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError:  # reset, or no answer to the keepalive probes
            data = b""
        with self._changed:
            if connection not in self._connections:  # closed by the main thread
                return
            if len(data) < _MESSAGE.size:
                self._selector.unregister(connection)
                connection.close()
                rank = self._connections.pop(connection)
                if rank not in self._left:
                    self._note_failure(rank)
            else:
                kind, rank = _MESSAGE.unpack(data)
                if kind == _FAILED:
                    self._note_failure(rank)
                elif kind == _LEFT:
                    self._note_left(rank)
                elif kind == _ALL_LEFT:
                    self._left.update(range(self.world))
            self._changed.notify_all()

    def _note_failure(self, rank: int) -> None:
        if self.failed is None:
            self.failed, self._end_at = rank, self._clock() + _GRACE
            if self.rank == 0:
                self._broadcast(_FAILED, rank)

    def _note_left(self, rank: int) -> None:
        self._left.add(rank)
        if self.rank == 0 and len(self._left) == self.world:
            self._broadcast(_ALL_LEFT, 0)

    def _broadcast(self, kind: bytes, rank: int) -> None:
        for connection in self._connections:
            self._send(connection, kind, rank)

    @staticmethod
    def _send(connection: socket.socket, kind: bytes, rank: int) -> None:
        with contextlib.suppress(OSError):  # its end is read next
            connection.sendall(_MESSAGE.pack(kind, rank))

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
        # A rank that has left has no error to wait for.
        if self.failed is not None and (late or self.rank in self._left):
            return (f"rank {self.rank} ends, since rank {self.failed} has failed: it raised, was killed, called "
                    f"os._exit, or its host was lost; see the output of rank {self.failed}")  # fmt: skip
        return ""

    def _long_waits(self) -> list[str]:
        """Texts for the waits that have become long since the last call."""
        now, waits, texts = self._clock(), dict(_waits), []
        self._reported &= {start for start, _ in waits.values()}
        for thread, (start, describe) in waits.items():
            if now - start >= _LONG_WAIT and start not in self._reported:
                self._reported.add(start)
                frame = _callsite.user_frame(sys._current_frames().get(thread))
                where = f", called at {_callsite.site(frame)}" if frame else ""
                waited, reason = describe()
                texts.append(f"rank {self.rank} has waited {now - start:.0f} s {waited}{where}: {reason}")
        return texts

    # --- the end --------------------------------------------------------------------------------------------------

    def leave(self, *, failed: bool) -> None:
        """Tell the other ranks that this one ends; unless it has failed, wait until all end, for at most 5 s."""
        with self._changed:
            if self._closed:
                return
            self._broadcast(_FAILED if failed else _LEFT, self.rank)
            if failed:
                self.failed, self._end_at = self.rank, self._clock() + _GRACE
                return
            self._note_left(self.rank)
            self._changed.wait_for(lambda: self.failed is not None or len(self._left) == self.world, _LEAVE)
            self._closed = self.rank != 0 and self.failed is None  # what fails from now on does not end this rank

    def close(self) -> None:
        """End the thread and close the connections. A rank 0 that has not failed first waits until all others have.

        It tells them of failures, and has the store. Where the launcher has the store, it watches the ranks too.
        """
        with self._changed:
            if self._is_needed and self.rank in self._left:
                with Wait(self._describe_end):
                    self._changed.wait_for(lambda: not self._connections)
            self._closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # where a forked child has it too
                connection.close()
            self._connections.clear()

    def _describe_end(self) -> tuple[str, str]:
        others = sorted(self._connections.values())
        ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        return f"at its end for {ranks} to end", "it tells them of failures, and has the store that they use"

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
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    out = Watchdog(rank, world, launcher=launcher_id(), has_store=has_store)
    out.start()
    return out


def launcher_id() -> int | None:
    """Return the process id of the agent of torchrun that started this process; `None` without an agent."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def call_at_exit(leave: Callable[[bool], None], fail: Callable[[], None]) -> None:
    """Call `leave(failed)` when the program ends, after its threads; and `fail()` before that if an exception ends it.

    Python does not say with which status `sys.exit` ends a program that was not started by multiprocessing. An
    exception at an interactive prompt ends nothing.
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
        raising = e is not None and not (isinstance(e, SystemExit) and not e.code)
        leave(raising or (getattr(sys, "last_value", None) is not before and not _is_interactive()))

    sys.excepthook = excepthook
    if multiprocessing.parent_process() is None:
        atexit.register(at_exit)
    else:  # such a process may end by os._exit, after its finalizers
        multiprocessing.util.Finalize(None, at_exit, exitpriority=0)


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

"""The meeting of the ranks of one attempt: rank 0 answers each other rank once, and refuses ranks of other jobs.

Agents of torchrun keep one store for all attempts, with the keys of those before a restart. Only rank 0 knows which
attempt is the last, and no rank 0 answers at the port of a former one.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import time
from typing import Any

from fshard.errors import fail

_ANSWER_TIMEOUT = 60.0  # seconds for rank 0, which may be busy, to accept a connection
_HELLO_TIMEOUT = 1.0  # seconds for a rank that has connected to send which it is; it may try again
_RETRY = 0.5  # seconds

OTHER_PORT = "another port: MASTER_PORT, or --master-port or --rdzv-endpoint of torchrun"

KEY = "fshard/rank 0"  # in the store: its port, and the token of this attempt
HELLO = struct.Struct("!c16sII")  # b"H", the token, the world size and the rank
ACCEPTED, _REFUSED = b"A", b"R"
_ANSWER = struct.Struct("!c16sI")  # accepted or refused, the token, and the world size of rank 0


def announce(store: Any, host: str, world: int) -> tuple[socket.socket, bytes]:
    """Listen on rank 0 of `world` ranks, which reach it at `host`. Return the listener and a new token."""
    listener, token = listen(host, world), os.urandom(16)
    store.set(KEY, f"{listener.getsockname()[1]} {token.hex()}")
    return listener, token


def listen(host: str, world: int) -> socket.socket:
    """Listen at the address of this machine that `host` names, or else at all of its addresses.

    A name such as localhost may mean this machine here, and another one elsewhere.
    """
    with contextlib.suppress(OSError):  # an address of a router, a name that only others know
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        only_here = ipaddress.ip_address(address[0]).is_loopback
        if not only_here or host == address[0] or os.environ.get("LOCAL_WORLD_SIZE") == str(world):
            return socket.create_server(address[:2], family=family, backlog=world)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=world)


def accept(listener: socket.socket, token: bytes, world: int, known: set[int]) -> tuple[socket.socket, int] | None:
    """Accept a connection, and return it with its rank; or refuse it: a rank that is `known` is of another job.

    Raises OSError if this process has too many open files.
    """
    try:
        connection, _ = listener.accept()
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None  # it has gone
    with contextlib.suppress(OSError):
        connection.settimeout(_HELLO_TIMEOUT)
        hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
        if len(hello) == HELLO.size and hello.startswith(b"H" + token):
            *_, its_world, rank = HELLO.unpack(hello)
            fits = its_world == world and 0 < rank < world and rank not in known
            connection.sendall(_ANSWER.pack(ACCEPTED if fits else _REFUSED, token, world))
            if fits:
                known.add(rank)
                return connection, rank
    connection.close()
    return None


def connect(store: Any, host: str, port: str, rank: int, world: int) -> tuple[socket.socket, bytes]:
    """Connect to rank 0, which has the store at `host:port`. Return the connection and the token of the attempt.

    Raises ShardingError if rank 0 is of another job, or does not answer within the timeout of the store.
    """
    deadline = time.monotonic() + store.timeout.total_seconds()
    while True:
        zero, token = store.get(KEY).decode().split()
        with contextlib.ExitStack() as stack:
            try:
                connection = socket.create_connection((host, int(zero)), timeout=_ANSWER_TIMEOUT)
                stack.enter_context(connection)
                connection.sendall(HELLO.pack(b"H", bytes.fromhex(token), world, rank))
                answer, why = connection.recv(_ANSWER.size, socket.MSG_WAITALL), "another program answers"
            except OSError as e:
                answer, why = b"", str(e)
            if answer[:1] in (ACCEPTED, _REFUSED) and answer[1:17].hex() == token:
                kind, _, its_world = _ANSWER.unpack(answer)
                if kind == ACCEPTED:
                    stack.pop_all()
                    return connection, bytes.fromhex(token)
                there = f"{its_world} ranks" if its_world != world else f"a rank {rank} already"
                raise fail(f"make_mesh: another job, or an attempt that is ending, uses port {port} of {host}",
                           f"this is rank {rank} of {world}, and that job has {there}", fix=OTHER_PORT)  # fmt: skip
        if time.monotonic() > deadline:
            raise fail(f"make_mesh: rank {rank} does not reach rank 0 at port {zero} of {host}", why,
                       fix="see rank 0's output; a firewall must let ranks reach each other's ports")  # fmt: skip
        time.sleep(_RETRY)

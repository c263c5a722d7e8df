"""Programs that tests fork from their own process, as ranks that a launcher starts; and a port for them."""

from __future__ import annotations

import gc
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable

_reserved: deque[socket.socket] = deque(maxlen=100)


def free_port() -> int:
    """Return a port on which only a program that is told of it will listen.

    It is reserved: the system could give it to another program while the one that will listen loads torch.
    """
    _reserved.append(socket.socket())
    _reserved[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does, which may then bind it, too
    _reserved[-1].bind(("127.0.0.1", 0))
    return int(_reserved[-1].getsockname()[1])


def set_rank(rank: int, world: int, port: int) -> None:
    """Set the variables of a rank that a launcher starts."""
    values = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in values.items()}


def fork(job: Callable[[], object]) -> int:
    """Run `job` in a child process, which prints nothing, and return its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads of this process, which the child does not need
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        gc.freeze()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        job()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    """Wait for a child; return its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

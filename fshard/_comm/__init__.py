"""Communication: the protocol that moves tensors between ranks, its three implementations, and the region of a call.

`protocol` is what the rest of fshard uses. `process` implements it over torch.distributed, `simulated` with threads,
`abstract` with shapes alone. Nothing outside this package asks which of them it has.
"""

from .abstract import AbstractComm, cannot_ask, dry
from .host_memory import HOST, awaited, before_writing, down, home, meeting, room, sent_up, settle, to_device, up
from .packing import cut, join, pack, pad, unpack
from .process import ProcessComm
from .protocol import Axes, Comm, Flight, index_of, size_of
from .record import Transfer, moved, recording, transposing, watched
from .region import Axis, Region, bind, checker, in_region, known_axes, live_axes, refuse_nesting, region
from .simulated import simulate
from .storage import marked, memory_of

__all__ = [
    "HOST", "AbstractComm", "Axes", "Axis", "Comm", "Flight", "ProcessComm", "Region", "Transfer", "awaited",
    "before_writing", "bind", "cannot_ask", "checker", "cut", "down", "dry", "home", "in_region", "index_of", "join",
    "known_axes", "live_axes", "marked", "meeting", "memory_of", "moved", "pack", "pad", "recording", "refuse_nesting",
    "region", "room", "sent_up", "settle", "simulate", "size_of", "to_device", "transposing", "unpack", "up", "watched",
]  # fmt: skip

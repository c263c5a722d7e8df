"""Bytes of one step below torch: all that torch, oneDNN and MKL ask from the C library (`below_torch.c`).

torch's profiler sees the blocks of torch's allocator, and not what oneDNN allocates: packed weights, copies in another
layout, scratch memory. Blocks that a library keeps between steps count, if it asked for them after `begin`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


def preload() -> None:
    """Run this program anew with the counting library, which its forks have too; without a C compiler do nothing."""
    if is_counting() or shutil.which("gcc") is None or sys.platform != "linux":
        return
    library = Path(tempfile.mkdtemp()) / "below_torch.so"
    build(library)
    module = sys.modules["__main__"].__spec__
    os.execve(sys.executable, [sys.executable, "-m", module.name, *sys.argv[1:]],
              {**os.environ, "LD_PRELOAD": str(library)})  # fmt: skip


def build(library: Path) -> None:
    """Compile the counting library."""
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", "-o", library, _SOURCE], check=True)


def is_counting() -> bool:
    """Return whether the library counts in this process."""
    return hasattr(ctypes.CDLL(None), "below_torch_begin")


def begin() -> None:
    """Begin to count: blocks from before are not there."""
    ctypes.CDLL(None).below_torch_begin()


def reset_peak() -> int:
    """Begin to look for a peak; return the bytes that are live now."""
    ctypes.CDLL(None).below_torch_reset_peak()
    return _number("live")


def peak() -> int:
    """Return the most bytes that were live since `reset_peak`."""
    return _number("peak")


def _number(name: str) -> int:
    function = getattr(ctypes.CDLL(None), f"below_torch_{name}")
    function.restype = ctypes.c_long
    return int(function())

"""`python -m fshard measure`: the rates of this machine's device and of the links of all ranks, for `plan`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from fshard._core.display import duration
from fshard.errors import fail
from fshard.mesh import Mesh, make_mesh
from fshard.planning import devices
from fshard.planning.rates import compare_transfers
from fshard.planning.table import aligned
from fshard.spec import size


def add(commands: Any) -> None:
    """Add `measure` to the commands of a parser."""
    command = commands.add_parser(
        "measure", help="measure this device and its network, and write a file that `plan --device FILE` reads",
        description="Measure products, memory, the operations of small train steps, and, under `launch -m fshard "
                    "measure` or torchrun, the links within a machine and between machines.",
    )  # fmt: skip
    command.add_argument("--out", metavar="FILE", help="to write, with the suffix .json")
    command.add_argument("--seconds", type=float, default=6.0, help="of measuring the device (default: 6)")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str | int:
    out = Path(options.out) if options.out else None
    if out is not None and (out.suffix != ".json" or not out.parent.is_dir()):
        raise fail(f"measure: --out {out}", fix="a file with the suffix .json, in a folder that exists")
    mesh = _mesh()
    device = devices.measure(mesh, seconds=options.seconds)
    rows = compare_transfers(mesh, device)
    if mesh.ranks[0] != 0:
        return 0
    if out is not None:
        devices.write(device, out)
    cells = [(r.op, "+".join(r.axes), str(r.ranks), size(r.nbytes), duration(r.measured), duration(r.planned))
             for r in rows]  # fmt: skip
    head = ("transfer", "over", "ranks", "of each rank", "measured", "planned")
    launch = f"an operation starts in {duration(device.launch)}"
    return "\n".join([f"{device!r}; {launch}", *(aligned([head, *cells], [0, 1]) if cells else [])])


def _mesh() -> Mesh:
    """Return the mesh of all ranks: machines, and the ranks of each, which are nearest."""
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world == 1:
        return make_mesh(kind="simulated", machine=1)
    return make_mesh(rank=world) if world == local else make_mesh(machine=world // local, rank=local)

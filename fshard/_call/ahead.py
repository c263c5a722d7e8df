"""When a compiled program moves what it sums: as soon as it is there, and while the rest is computed.

Inductor orders a program for the least memory, which puts the gradients of weights before the gradient that the other
ranks wait for, and the sum of that where nothing is left to compute meanwhile.
"""

from __future__ import annotations

from typing import Any

from fshard._torch_compat import functional_collectives


def ahead(nodes: list[Any]) -> list[Any]:
    """A schedule of inductor's with its sums started as early, and waited for as late, as the rest allows.

    Programs that gather stay as they are: all the gathers of parameters would start at once, and what they bring would
    be held from the beginning.
    """
    from torch._inductor import comms, utils  # with it comes the compiler, which most programs never need

    ops = functional_collectives
    sums = [ops.all_reduce_.default, ops.all_reduce.default, ops.reduce_scatter_tensor.default]
    moving = [node.node for node in nodes if utils.contains_collective(node)]
    if not all(getattr(node, "op_overload", None) in sums for node in moving):
        return nodes
    return comms.sink_waits(comms.raise_comms(nodes))


OPTIONS: dict[str, Any] = {  # of torch.compile
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [ahead],
}

__all__ = ["OPTIONS", "ahead"]

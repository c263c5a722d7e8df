"""A backward pass in two parts: now the gradients of a graph's inputs, later the gradients of most weights.

A node of the graph that is on a path to an input, and next to a weight, as a product with a matrix is, runs twice:
now for the input, and later for the weight. The engine computes at each run only the gradients that it needs, so that
together the two cost as much as one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node


def backward_of_inputs(
    roots: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Callable[[], None]:
    """Add to the `.grad` of the inputs, all leaves. The returned function adds to the `.grad` of the weights.

    Weights that two nodes use, or a user's autograd Function, have their gradients now: a Function computes all of
    them together, and a path from one node to the other would run again.
    """
    parents: dict[Node, set[Node]] = {root.node: set() for root in roots}
    stack = list(parents)
    while stack:
        node = stack.pop()
        for child in {child for child, _ in node.next_functions if child is not None}:
            stack += [child] * (child not in parents)
            parents.setdefault(child, set()).add(node)
    on_path: set[Node] = set()  # to an input
    stack = [get_gradient_edge(x).node for x in inputs]
    while stack:
        node = stack.pop()
        stack += parents.get(node, set()) - on_path
        on_path.add(node)
    of_node: dict[Node, list[Tensor]] = {}
    now = list(inputs)
    for w in weights:
        node = get_gradient_edge(w).node
        while node not in on_path and len(parents.get(node, ())) == 1:
            (node,) = parents[node]
        is_late = node in on_path and not isinstance(node, BackwardCFunction)
        (of_node.setdefault(node, []) if is_late else now).append(w)
    arrived: dict[Node, Sequence[Tensor | None]] = {}
    hooks = [node.register_prehook(lambda gs, node=node: arrived.update({node: gs})) for node in of_node]
    torch.autograd.backward(roots, grads, inputs=now, retain_graph=bool(of_node))
    for hook in hooks:
        hook.remove()

    def later() -> None:
        for node, ws in of_node.items():
            known = [(GradientEdge(node, i), g) for i, g in enumerate(arrived.pop(node, ())) if g is not None]
            if known:
                torch.autograd.backward([e for e, _ in known], [g for _, g in known], inputs=ws)
        of_node.clear()

    return later

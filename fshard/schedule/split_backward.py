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
    users = _users(roots, inputs, weights)
    of_node: dict[Node, list[Tensor]] = {}
    now = list(inputs)
    for w, nodes in users.items():
        (node,) = nodes if len(nodes) == 1 else (None,)
        if node is None or isinstance(node, BackwardCFunction):
            now.append(w)
        else:
            of_node.setdefault(node, []).append(w)
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


def _users(
    roots: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> dict[Tensor, set[Node | None]]:
    """Return the nodes on paths to an input by which a gradient leaves these paths to a weight, for each weight.

    None is among them if a gradient reaches the weight from a root without meeting such a path.
    """
    order: list[Node] = []  # each node after those that it passes gradients to
    stack: list[tuple[Node, bool]] = [(root.node, False) for root in roots]
    seen: set[Node] = set()
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    leaf_of = {get_gradient_edge(w).node: w for w in weights}
    on_path = {get_gradient_edge(x).node for x in inputs}
    reached: dict[Node, set[Tensor]] = {}  # the weights below a node that is not on a path to an input
    users: dict[Tensor, set[Node | None]] = {}
    for node in order:
        children = {child for child, _ in node.next_functions if child is not None}
        below = {w for child in children - on_path for w in reached[child]}
        if not on_path.isdisjoint(children | {node}):
            on_path.add(node)
            for w in below:
                users.setdefault(w, set()).add(node)
        else:
            reached[node] = below | ({leaf_of[node]} if node in leaf_of else set())
    for root in roots:
        for w in reached.get(root.node, ()):
            users.setdefault(w, set()).add(None)
    return users

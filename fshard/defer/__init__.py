"""Any `nn.Module` as a pure function and a tree of described leaves: `apply, tree = defer(constructor)`.

1. Constructor: `defer` runs it under modes in which tensors are fake and have no memory (`recorder.py`). The module
   that it makes is kept as a skeleton, for its forward and its attributes.
2. Graph: each operation on a tensor is a node: a draw, a number, a view, a write (`graph.py`). A write gives a storage
   a new node, so that each parameter ends with the node that computes its value.
3. Leaf: the tree describes each parameter and buffer by its shape, its dtype and its node (`constructor.py`). A tie is
   one leaf.
4. Replay: `materialize` computes, for each device, the part of the node's value that the device stores (`replay.py`).
   Draws are by the key of the leaf and the index of the element, so every mesh has the same values.

`Apply` calls the forward of the skeleton on the leaves that it is passed (`functional_module.py`). Its units gather
their leaves around their forwards (`units.py`), its draws are by a key (`draws.py`), and submodules may be replaced by
functions on shards (`replaced.py`).
"""

from .constructor import defer
from .functional_module import Apply
from .generation import generate

__all__ = ["Apply", "defer", "generate"]

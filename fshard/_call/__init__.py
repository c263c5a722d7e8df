"""One call of `shard_map`: arguments cut for the ranks, and the ranks' results joined."""

from .arguments import CallPlan, cut, donated, make_plan, signature
from .results import Kinds, Row, agree, collect, leaves_as, memories, returned, specs_of

__all__ = [
    "CallPlan",
    "Kinds",
    "Row",
    "agree",
    "collect",
    "cut",
    "donated",
    "leaves_as",
    "make_plan",
    "memories",
    "returned",
    "signature",
    "specs_of",
]  # fmt: skip

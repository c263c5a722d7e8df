"""Generation of tokens by any model that gives logits: `Options`, and `generate`, the loop over a `Decoder`."""

from .decoder import Decoder, check_ids
from .filters import argmax
from .loop import generate, global_batch
from .options import Options

__all__ = ["Decoder", "Options", "argmax", "check_ids", "generate", "global_batch"]

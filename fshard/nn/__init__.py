"""Pure layers and losses: sharded over a mesh axis with `axis=`, dense without."""

from typing import TYPE_CHECKING

from torch.nn import functional

from fshard.errors import other_names

from .batch_norm import batch_norm
from .context import context_attention
from .convolution import avg_pool2d, conv2d, max_pool2d
from .experts import Balance, Routing, balance, grouped_linear, mixture, route
from .flash import attention_lse
from .layers import attention, causal_mask, dropout, embedding, gelu, layer_norm, linear, mlp, rms_norm
from .loss import cross_entropy
from .margins import arcface, cosface, cosine_logits, margin
from .ranking import accuracy, top_k
from .replacement import Replacement, column_embedding, column_linear, row_embedding, row_linear
from .sampled_classes import sample_classes
from .zigzag import from_zigzag, to_zigzag, zigzag_positions

__all__ = [
    "Balance", "Replacement", "Routing", "accuracy", "arcface", "attention", "attention_lse", "avg_pool2d",
    "balance", "batch_norm", "causal_mask", "column_embedding", "column_linear", "context_attention", "conv2d",
    "cosface", "cosine_logits", "cross_entropy", "dropout", "embedding", "from_zigzag", "gelu", "grouped_linear",
    "layer_norm", "linear", "margin", "max_pool2d", "mixture", "mlp", "rms_norm", "route", "row_embedding",
    "row_linear", "sample_classes", "to_zigzag", "top_k", "zigzag_positions",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__, {}, functional)

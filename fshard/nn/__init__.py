"""Pure layers and losses: sharded over a mesh axis with `axis=`, dense without."""

from .batch_norm import batch_norm
from .classes import sample_classes
from .convolution import avg_pool2d, conv2d, max_pool2d
from .layers import attention, causal_mask, dropout, embedding, gelu, layer_norm, linear, mlp, rms_norm
from .loss import cross_entropy
from .margins import arcface, cosface, cosine_logits, margin
from .ranking import accuracy, top_k

__all__ = [
    "accuracy", "arcface", "attention", "avg_pool2d", "batch_norm", "causal_mask", "conv2d", "cosface", "cosine_logits",
    "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "margin", "max_pool2d", "mlp", "rms_norm",
    "sample_classes", "top_k",
]  # fmt: skip

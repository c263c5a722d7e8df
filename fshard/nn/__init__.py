"""Pure layers and losses: sharded over a mesh axis with `axis=`, dense without."""

from .batch_norm import batch_norm
from .convolution import avg_pool2d, conv2d, max_pool2d
from .layers import attention, causal_mask, dropout, embedding, gelu, layer_norm, linear, mlp, rms_norm
from .loss import cross_entropy
from .ranking import accuracy, top_k

__all__ = [
    "accuracy", "attention", "avg_pool2d", "batch_norm", "causal_mask", "conv2d", "cross_entropy", "dropout",
    "embedding", "gelu", "layer_norm", "linear", "max_pool2d", "mlp", "rms_norm", "top_k",
]  # fmt: skip

"""Pure layers and losses: sharded over a mesh axis with `axis=`, dense without."""

from .layers import attention, causal_mask, dropout, embedding, gelu, layer_norm, linear, mlp, rms_norm
from .loss import cross_entropy
from .ranking import accuracy, top_k

__all__ = [
    "accuracy", "attention", "causal_mask", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear",
    "mlp", "rms_norm", "top_k",
]  # fmt: skip

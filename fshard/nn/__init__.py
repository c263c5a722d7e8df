"""Pure layers and losses: sharded over a mesh axis with `axis=`, dense without."""

from .layers import attention, causal_mask, dropout, embedding, gelu, layer_norm, linear, mlp, rms_norm
from .loss import cross_entropy

__all__ = [
    "attention", "causal_mask", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "mlp",
    "rms_norm",
]  # fmt: skip

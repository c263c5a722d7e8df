"""Pure layers and losses: sharded over a mesh axis with `axis=`, dense without."""

from .classes import sample_classes
from .layers import attention, causal_mask, dropout, embedding, gelu, layer_norm, linear, mlp, rms_norm
from .loss import cross_entropy
from .margins import arcface, cosface, cosine_logits, margin

__all__ = [
    "arcface", "attention", "causal_mask", "cosface", "cosine_logits", "cross_entropy", "dropout", "embedding", "gelu",
    "layer_norm", "linear", "margin", "mlp", "rms_norm", "sample_classes",
]  # fmt: skip

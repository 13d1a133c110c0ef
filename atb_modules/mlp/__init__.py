"""Feed-forward networks: gated (SwiGLU, GeGLU) and plain (GELU, ReLU2)."""

from atb_modules.mlp.feed_forward import FeedForward, MLPConfig, MLPType
from atb_modules.mlp.functional import activation, gated_activation

__all__ = ["FeedForward", "MLPConfig", "MLPType", "activation", "gated_activation"]

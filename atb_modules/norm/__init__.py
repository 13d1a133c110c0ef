"""Normalisation: RMSNorm and LayerNorm, alone and fused with the residual add."""

from atb_modules.norm.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atb_modules.norm.modules import LayerNorm, NormCastOrder, NormConfig, NormType, RMSNorm, build_norm

__all__ = [
    "LayerNorm",
    "NormCastOrder",
    "NormConfig",
    "NormType",
    "RMSNorm",
    "add_layer_norm",
    "add_rms_norm",
    "build_norm",
    "layer_norm",
    "rms_norm",
]

"""Normalisation: RMSNorm and LayerNorm, alone, fused with the residual add, and modulated (AdaLN)."""

from atb_modules.norm.deepnorm import DeepNorm, DeepNormResidual
from atb_modules.norm.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from atb_modules.norm.modulated import AdaLayerNorm, AdaLayerNormZero, Modulation, modulated_norm
from atb_modules.norm.modules import LayerNorm, NormCastOrder, NormConfig, NormType, RMSNorm, build_norm

__all__ = [
    "AdaLayerNorm",
    "AdaLayerNormZero",
    "DeepNorm",
    "DeepNormResidual",
    "LayerNorm",
    "Modulation",
    "NormCastOrder",
    "NormConfig",
    "NormType",
    "RMSNorm",
    "add_layer_norm",
    "add_rms_norm",
    "build_norm",
    "layer_norm",
    "modulated_norm",
    "rms_norm",
]

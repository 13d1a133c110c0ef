"""The C++ kernels of the CPU as torch.library ops (namespace ``atb_modules``)."""

from . import (
    library,
    ops_activation,
    ops_attention,
    ops_attention_pair,
    ops_linear,
    ops_moe,
    ops_norm,
    ops_norm_chains,
    ops_paged,
    ops_rotary,
    records,
    records_chains,
    records_moe,
    records_paged,
)
from .decode_layer import DecodeLayerPlan, DecodeSettings, DecodeWeights
from .decode_stack import DecodeStackPlan

__all__ = [
    "DecodeLayerPlan",
    "DecodeSettings",
    "DecodeStackPlan",
    "DecodeWeights",
    "library",
    "ops_activation",
    "ops_attention",
    "ops_attention_pair",
    "ops_linear",
    "ops_moe",
    "ops_norm",
    "ops_norm_chains",
    "ops_paged",
    "ops_rotary",
    "records",
    "records_chains",
    "records_moe",
    "records_paged",
]

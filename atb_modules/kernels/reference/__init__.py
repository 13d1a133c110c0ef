"""The einops reference of every op: reads like the formula, any floating dtype, float64-capable, never fast."""

from atb_modules.kernels.reference import (  # noqa: F401  (registration)
    attention,
    cache,
    linear,
    mlp,
    moe,
    norm,
    norm_linear,
    quantized_linear,
    rotary,
)

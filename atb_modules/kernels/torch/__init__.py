"""Plain PyTorch kernels of every op: differentiable, any device, the fallback that is always there."""

from atb_modules.kernels.torch import (  # noqa: F401  (registration)
    attention,
    blocked,
    cache,
    flex,
    linear,
    mlp,
    moe,
    norm,
    norm_linear,
    paged,
    quantized_linear,
    rotary,
)

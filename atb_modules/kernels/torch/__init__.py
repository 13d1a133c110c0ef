"""Plain PyTorch kernels of every op: differentiable, any device, the fallback that is always there."""

from atb_modules.kernels.torch import attention, blocked, cache, flex, linear, mlp, moe, norm, paged, rotary  # noqa: F401  (registration)

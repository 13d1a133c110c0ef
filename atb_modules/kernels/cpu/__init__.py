"""The C++ kernels of the CPU as torch.library ops (namespace ``atb_modules``)."""

from . import library, ops_activation, ops_norm, ops_rotary

__all__ = ["library", "ops_activation", "ops_norm", "ops_rotary"]

"""add_norm: the sum of a branch and the residual stream with its norm, by our norms or by any other."""

from __future__ import annotations

from torch import Tensor, nn

from atb_modules.norm.modules import LayerNorm, RMSNorm


def add_norm(norm: nn.Module, branch: Tensor, x: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """``(norm(branch + x), branch + x)``: in one pass where the norm is ours, else ``norm`` gets the sum alone.

    ``overwrite`` lets the sum take branch's memory, see ``RMSNorm``.
    """
    if type(norm).forward in (RMSNorm.forward, LayerNorm.forward) and "forward" not in vars(norm):
        return norm(branch, x, overwrite=overwrite)
    x = branch + x
    return norm(x), x

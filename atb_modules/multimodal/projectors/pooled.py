"""PooledProjector: neighbouring patches averaged, normed and brought to the language model's width (Gemma 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atb_modules.checks import check_int
from atb_modules.linear import Linear
from atb_modules.multimodal.vision.pooling import PoolMode, pool_tokens
from atb_modules.norm import NormConfig, build_norm
from atb_modules.strategies import parse_enum

from .pixel_shuffle import image_grid


class PooledProjector(nn.Module):
    """Pooling over windows of ``stride`` x ``stride`` patches, an RMSNorm, a linear layer (Gemma 3, 2025).

    Args:
        in_features: channels of a patch.
        out_features: channels of the language model.
        stride: patches a side of a window; Gemma 3's is patches a side over tokens a side.
        mode: a ``PoolMode`` or its word.
        norm: a ``NormConfig``; Gemma's has ``weight_offset=1.0``.

    x: (images, patches, in_features), row by row; grid: (rows, columns), default the square ->
    (images, pooled patches, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        stride: int,
        *,
        mode: PoolMode | str = PoolMode.AVG,
        norm: NormConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("in_features", in_features)
        check_int("stride", stride)
        self.in_features, self.stride, self.mode = in_features, stride, parse_enum(PoolMode, mode, "mode")
        self.norm = build_norm("rmsnorm", in_features, norm if norm is not None else NormConfig(), device, dtype)
        self.proj = Linear(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        pooled = pool_tokens(x, image_grid(x, grid, self.in_features), self.stride, self.mode)
        return self.proj(self.norm(pooled))

    def extra_repr(self) -> str:
        return f"{self.in_features}, stride={self.stride}, mode={self.mode.value}"

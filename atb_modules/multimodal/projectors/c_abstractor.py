"""CAbstractor: convolutions around an adaptive pooling, which keep what is where (Honeybee, Cha et al. 2024)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from atb_modules.checks import check_int

from .linear import MLPProjector
from .pixel_shuffle import image_grid


class CAbstractor(nn.Module):
    """A stage of RegNet blocks, pooling to ``num_tokens``, another stage, and an MLP.

    The blocks are timm's (``timm.models.regnet.RegStage``), with squeeze and excitation, SiLU and LayerNorm.

    Args:
        in_features: channels of a patch.
        out_features: channels of the language model.
        num_tokens: tokens that come out, a square number.
        hidden_features: channels between; default in_features.
        depth: blocks in each stage.
        mlp_depth: linear layers at the end.
        num_patches: patches an image has, for trained positions; None for no positions.

    x: (images, patches, in_features), row by row; grid: (rows, columns), default the square ->
    (images, num_tokens, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_tokens: int = 144,
        *,
        hidden_features: int | None = None,
        depth: int = 3,
        mlp_depth: int = 2,
        num_patches: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # Blocks of timm, which `import atb_modules` does not wait for.
        from timm.layers import LayerNorm2d
        from timm.models.regnet import RegStage

        for name, value in (("in_features", in_features), ("num_tokens", num_tokens), ("depth", depth)):
            check_int(name, value)
        check_int("num_patches", num_patches, optional=True)
        check_int("hidden_features", hidden_features, optional=True)
        side = math.isqrt(num_tokens)
        if side * side != num_tokens:
            raise ValueError(f"num_tokens is {num_tokens}; allowed: a square number")
        middle = in_features if hidden_features is None else hidden_features
        self.in_features, self.num_tokens = in_features, num_tokens
        stage = partial(RegStage, depth, stride=1, dilation=1, act_layer=nn.SiLU, norm_layer=LayerNorm2d)
        self.positions = None
        if num_patches is not None:
            self.positions = nn.Parameter(torch.zeros(num_patches, in_features, device=device, dtype=dtype))
        self.before = stage(in_chs=in_features, out_chs=middle).to(device=device, dtype=dtype)
        self.pool = nn.AdaptiveAvgPool2d((side, side))
        self.after = stage(in_chs=middle, out_chs=middle).to(device=device, dtype=dtype)
        self.mlp = MLPProjector(
            middle, out_features, out_features, depth=mlp_depth, kind="silu", device=device, dtype=dtype
        )

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        rows, columns = image_grid(x, grid, self.in_features)
        if self.positions is not None:
            if self.positions.shape[0] != x.shape[1]:
                raise ValueError(f"x has {x.shape[1]} patches; num_patches is {self.positions.shape[0]}")
            x = x + self.positions
        x = x.transpose(1, 2).unflatten(2, (rows, columns))
        x = self.after(self.pool(self.before(x)))
        return self.mlp(x.flatten(2).transpose(1, 2))

    def extra_repr(self) -> str:
        return f"{self.in_features}, num_tokens={self.num_tokens}"

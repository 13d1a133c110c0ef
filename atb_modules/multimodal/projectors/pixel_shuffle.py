"""Pixel shuffle: blocks of patches become one token each, their channels side by side (InternVL, Idefics 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atb_modules.checks import check_bool, check_floating, check_int
from atb_modules.norm import NormConfig, build_norm

from .linear import MLPProjector


def pixel_shuffle(x: Tensor, factor: int = 2) -> Tensor:
    """(..., rows, columns, channels) -> (..., rows / factor, columns / factor, channels * factor ** 2).

    The channels of a block's patches stand row by row (space to depth; Shi et al. 2016, backwards)::

        0 1 2 3                  [0 1 4 5] [2 3 6 7]
        4 5 6 7
    """
    check_floating("x", x)
    check_int("factor", factor)
    if x.dim() < 3 or x.shape[-3] % factor or x.shape[-2] % factor:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; allowed: (..., rows, columns, channels), multiples of factor {factor}"
        )
    rows, columns, channels = x.shape[-3:]
    blocks = x.reshape(*x.shape[:-3], rows // factor, factor, columns // factor, factor, channels).transpose(-4, -3)
    return blocks.reshape(*x.shape[:-3], rows // factor, columns // factor, channels * factor**2)


class PixelShuffleProjector(nn.Module):
    """Pixel shuffle, a LayerNorm where asked for, and linear layers.

    ``depth=2, norm=True`` is InternVL's (Chen et al. 2024), ``depth=1, bias=False`` Idefics 3's and SmolVLM's.

    Args:
        in_features: channels of a patch.
        out_features: channels of the language model.
        factor: patches a side of what becomes one token.
        depth, kind, bias: of the ``MLPProjector``.
        norm: whether the joined channels are normed.
        eps: of the norm.

    x: (images, patches, in_features), row by row; grid: (rows, columns), default the square ->
    (images, patches / factor ** 2, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        factor: int = 2,
        *,
        depth: int = 2,
        kind: str = "gelu",
        bias: bool = True,
        norm: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("in_features", in_features)
        check_int("factor", factor, most=1024)
        check_bool("norm", norm)
        self.in_features, self.factor = in_features, factor
        joined = in_features * factor**2
        self.norm = build_norm("layernorm", joined, NormConfig(eps=eps), device, dtype) if norm else None
        self.mlp = MLPProjector(joined, out_features, depth=depth, kind=kind, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        rows, columns = image_grid(x, grid, self.in_features)
        x = pixel_shuffle(x.unflatten(1, (rows, columns)), self.factor).flatten(1, 2)
        return self.mlp(x if self.norm is None else self.norm(x))

    def extra_repr(self) -> str:
        return f"{self.in_features}, factor={self.factor}"


def image_grid(x: Tensor, grid: tuple[int, int] | None, in_features: int) -> tuple[int, int]:
    """(rows, columns) of the patches x (images, patches, in_features), checked; without a grid, of a square."""
    check_floating("x", x)
    if x.dim() != 3 or x.shape[2] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (images, patches, {in_features})")
    side = math.isqrt(x.shape[1])
    if grid is not None:
        if not isinstance(grid, (tuple, list)) or len(grid) != 2:
            raise ValueError(f"grid is {grid!r:.80}; allowed: (rows, columns)")
        for name, count in zip(("rows", "columns"), grid, strict=True):
            check_int(f"grid's {name}", count)
    rows, columns = (side, side) if grid is None else grid
    if rows * columns != x.shape[1]:
        asked = "no square, and grid is None" if grid is None else f"not those of grid {grid}"
        raise ValueError(f"x has {x.shape[1]} patches, {asked}; allowed: rows times columns of them")
    return rows, columns

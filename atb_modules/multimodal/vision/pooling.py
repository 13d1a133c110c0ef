"""Fewer tokens an image: 2-D pooling of a grid of tokens, and the grids of LLaVA-NeXT's tiles put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules.checks import check_floating, check_int
from atb_modules.strategies import parse_enum

from .image_size import HEIGHT_WIDTH, Size, check_size, limited_grid, tile_grid, unpadded_grid


class PoolMode(StrEnum):
    """AVG and MAX over windows of stride x stride tokens; BILINEAR resamples to the rounded-up size."""

    AVG = "avg"
    BILINEAR = "bilinear"
    MAX = "max"


def pooled_grid(grid: Size, stride: int, mode: PoolMode | str) -> Size:
    """(rows, columns) that ``pool_tokens`` leaves: rounded up for "bilinear", whole windows alone for the others."""
    mode = parse_enum(PoolMode, mode, "mode")
    check_size("grid", grid)
    check_int("stride", stride)
    if mode is PoolMode.BILINEAR:
        return math.ceil(grid[0] / stride), math.ceil(grid[1] / stride)
    if min(grid) < stride:
        raise ValueError(f"grid is {grid}; {mode.value} pooling with stride {stride} needs that many rows and columns")
    return grid[0] // stride, grid[1] // stride


def pool_tokens(tokens: Tensor, grid: Size, stride: int = 2, mode: PoolMode | str = PoolMode.AVG) -> Tensor:
    """Tokens of a grid pooled to fewer.

    Args:
        tokens: (images, rows * columns, channels), row by row.
        grid: (rows, columns).
        stride: side of a window; Gemma 3's "avg" takes patches a side // tokens a side, LLaVA-OneVision's videos 2.
        mode: "avg" (Gemma 3), "bilinear" (LLaVA-OneVision) or "max".

    Returns:
        (images, pooled rows * pooled columns, channels), see ``pooled_grid``; rows and columns past the last whole
        window are left out by "avg" and "max", as torch's pools do.

    Raises:
        ValueError, TypeError: tokens that are not those of the grid, naming both numbers.
    """
    mode = parse_enum(PoolMode, mode, "mode")
    image = _as_image("tokens", tokens, grid)
    rows, columns = pooled_grid(grid, stride, mode)
    if mode is PoolMode.BILINEAR:
        pooled = F.interpolate(image, size=(rows, columns), mode="bilinear")
    elif mode is PoolMode.AVG:
        pooled = F.avg_pool2d(image, stride)
    else:
        pooled = F.max_pool2d(image, stride)
    return pooled.flatten(2).transpose(1, 2)


def resample_tokens(tokens: Tensor, grid: Size, target: Size) -> Tensor:
    """Tokens (images, rows * columns, channels) of one grid resampled to another, bilinear, widened where it shrinks.

    The tokens themselves where the grid is the target.
    """
    image = _as_image("tokens", tokens, grid)
    check_size("target", target)
    if tuple(grid) == tuple(target):
        return tokens
    wide = torch.promote_types(tokens.dtype, torch.float32)
    resampled = F.interpolate(image.to(wide), size=tuple(target), mode="bilinear", antialias=True)
    return resampled.to(tokens.dtype).flatten(2).transpose(1, 2)


def join_tiles(
    features: Tensor,
    image_size: Size,
    *,
    pinpoints: Sequence[Sequence[int]],
    tile_size: int,
    newline: Tensor | None = None,
    max_tiles: int | None = None,
) -> Tensor:
    """The tokens of one any-resolution image, as the language model reads them (LLaVA-NeXT).

    Args:
        features: (1 + tiles, side * side, channels): the whole image in one tile, then its tiles row by row.
        image_size: (height, width) of the image before it was resized.
        pinpoints: (height, width) of the allowed resolutions.
        tile_size: side of a tile in pixels.
        newline: (channels,) a token that ends each row of the tiles, or None.
        max_tiles: LLaVA-OneVision's bound, see ``limited_grid``; None for LLaVA-NeXT.

    Returns:
        (tokens, channels): the whole image's, then the tiles' in raster order without what shows padding. As many as
        ``num_anyres_tokens`` says.

    Raises:
        ValueError, TypeError: another number of tiles than the size makes, naming both.
    """
    check_floating("features", features, "a tensor (1 + tiles, side * side, channels)")
    check_size("image_size", image_size, HEIGHT_WIDTH)
    down, across = tile_grid(*image_size, pinpoints, tile_size)
    if features.dim() != 3 or features.shape[0] != 1 + down * across:
        raise ValueError(
            f"features has shape {tuple(features.shape)}; an image of {image_size[0]} x {image_size[1]} pixels makes "
            f"1 + {down} x {across} tiles: ({1 + down * across}, side * side, channels)"
        )
    side = math.isqrt(features.shape[1])
    if side * side != features.shape[1]:
        raise ValueError(f"features has {features.shape[1]} tokens a tile; allowed: a square number")
    whole, tiles = features[0], features[1:]
    grid = (down * side, across * side)
    raster = tiles.unflatten(1, (side, side)).unflatten(0, (down, across)).transpose(1, 2).reshape(*grid, -1)
    (top, left), (rows, columns) = unpadded_grid(grid, image_size)
    part = raster[top : top + rows, left : left + columns]
    target = limited_grid((rows, columns), side, max_tiles)
    if target != (rows, columns):
        image = F.interpolate(part.permute(2, 0, 1).unsqueeze(0), size=target, mode="bilinear")
        part = image[0].permute(1, 2, 0)
    if newline is not None:
        check_floating("newline", newline, "a tensor (channels,) or None")
        if tuple(newline.shape) != (features.shape[2],):
            raise ValueError(f"newline has shape {tuple(newline.shape)}; features takes ({features.shape[2]},)")
        part = torch.cat((part, newline.to(part.dtype).expand(part.shape[0], 1, -1)), dim=1)
    return torch.cat((whole, part.flatten(0, 1)))


def _as_image(name: str, tokens: Tensor, grid: Size) -> Tensor:
    """(images, channels, rows, columns)."""
    check_floating(name, tokens, "a tensor (images, rows * columns, channels)")
    check_size("grid", grid)
    if tokens.dim() != 3 or tokens.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)}; grid {tuple(grid)} takes (images, {grid[0] * grid[1]}, channels)"
        )
    return tokens.unflatten(1, tuple(grid)).permute(0, 3, 1, 2)

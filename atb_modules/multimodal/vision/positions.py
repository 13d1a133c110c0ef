"""Where a patch stands: learned positions resampled to any grid, and 2-D rotary tables.

Checkpoints were trained with different resampling, and none of it can be read from the weights:

family                            mode       antialias   align_corners
DINOv2                            bicubic    no          no
DINOv2 with registers             bicubic    yes         no
SigLIP2 NaFlex                    bilinear   yes         no
Qwen3-VL                          bilinear   no          yes
timm (``resample_abs_pos_embed``) bicubic    yes         no
CLIP, SigLIP                      none: one size; transformers' option is bicubic without antialias
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atb_modules.checks import (
    check_bool,
    check_device,
    check_floating,
    check_int,
    check_number,
    check_parameter_dtype,
    check_tensor,
    check_type,
)
from atb_modules.strategies import parse_enum

from .image_size import check_size

Grid = tuple[int, int]


class InterpolationMode(StrEnum):
    """Kernel of a resampling: BICUBIC is torch's, a = -0.75, with antialias a = -0.5 as in PIL."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


@dataclass(frozen=True)
class Interpolation:
    """How a table of positions is resampled.

    Args:
        mode: an ``InterpolationMode`` or its word.
        antialias: whether the kernel widens where the table shrinks.
        align_corners: whether corner positions stay on corner patches; not with antialias.
    """

    mode: InterpolationMode | str
    antialias: bool = False
    align_corners: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", parse_enum(InterpolationMode, self.mode, "mode"))
        check_bool("antialias", self.antialias)
        check_bool("align_corners", self.align_corners)
        if self.antialias and self.align_corners:
            raise ValueError("antialias and align_corners are both True; allowed: one of them, or neither")


@dataclass(frozen=True)
class PositionConfig:
    """Learned positions.

    Args:
        grid: (rows, columns) of the stored table.
        interpolation: how it is resampled to other grids; None allows its own alone.
    """

    grid: Grid
    interpolation: Interpolation | None = None

    def __post_init__(self) -> None:
        check_size("grid", self.grid)
        object.__setattr__(self, "grid", tuple(self.grid))
        check_type("interpolation", self.interpolation, Interpolation, optional=True)


def interpolate_positions(table: Tensor, grid: Grid, target: Grid, interpolation: Interpolation) -> Tensor:
    """A table of positions resampled to another grid.

    Args:
        table: (rows * columns, channels), row by row.
        grid: (rows, columns) of the table.
        target: (rows, columns) wanted.
        interpolation: mode, antialias and align_corners, as the checkpoint was trained.

    Returns:
        (target rows * target columns, channels) in the table's dtype, computed in float32; ``table`` itself where
        the target is its own grid.
    """
    check_floating("table", table, "a tensor (rows * columns, channels)")
    check_size("grid", grid)
    check_size("target", target)
    check_type("interpolation", interpolation, Interpolation)
    if table.dim() != 2 or table.shape[0] != grid[0] * grid[1]:
        raise ValueError(f"table has shape {tuple(table.shape)}; grid {grid} takes ({grid[0] * grid[1]}, channels)")
    if tuple(target) == tuple(grid):
        return table
    image = table.to(torch.promote_types(table.dtype, torch.float32)).unflatten(0, grid).permute(2, 0, 1)
    # The size, never a scale factor: a rounded factor can lose a row.
    resampled = F.interpolate(
        image.unsqueeze(0),
        size=target,
        mode=str(interpolation.mode.value if isinstance(interpolation.mode, StrEnum) else interpolation.mode),
        align_corners=interpolation.align_corners,
        antialias=interpolation.antialias,
    )
    return resampled[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)


class LearnedPositions(nn.Module):
    """A learned position a patch, after ``num_prefix`` positions of tokens that stand before the patches.

    weight: (num_prefix + rows * columns, hidden_size), the prefix first.
    """

    def __init__(
        self,
        hidden_size: int,
        config: PositionConfig,
        *,
        num_prefix: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_type("config", config, PositionConfig)
        check_int("num_prefix", num_prefix, least=0)
        check_device(device)
        check_parameter_dtype(dtype)
        self.config, self.num_prefix = config, num_prefix
        rows = num_prefix + config.grid[0] * config.grid[1]
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)

    def prefix(self) -> Tensor:
        """(num_prefix, hidden_size)."""
        return self.weight[: self.num_prefix]

    def forward(self, target: Grid) -> Tensor:
        """Positions (rows * columns, hidden_size) of the patches of a grid, row by row.

        Raises:
            ValueError: another grid than the table's, where the configuration names no interpolation.
        """
        check_size("target", target)
        table = self.weight[self.num_prefix :] if self.num_prefix else self.weight
        target = (target[0], target[1])
        if target == self.config.grid:
            return table
        if self.config.interpolation is None:
            raise ValueError(
                f"the grid has {target[0]} x {target[1]} patches; the positions are for {self.config.grid[0]} x "
                f"{self.config.grid[1]}, and their configuration names no interpolation"
            )
        return interpolate_positions(table, self.config.grid, target, self.config.interpolation)

    def extra_repr(self) -> str:
        return f"grid={self.config.grid}, num_prefix={self.num_prefix}, interpolation={self.config.interpolation}"


def rotary_tables_2d(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of 2-D rotary positions (Qwen2-VL): a quarter of the channels' pairs turn by row, one by column.

    Args:
        positions: integers (tokens, 2), row and column.
        head_dim: channels a head, a multiple of 4; pairs are (i, i + head_dim / 2).
        base: of the frequencies ``base ** (-4 i / head_dim)``, the same ones for both axes.

    Returns:
        cos, sin: float32 (tokens, head_dim / 2), rows' angles first.
    """
    check_tensor("positions", positions, "a tensor of integers (tokens, 2)")
    check_int("head_dim", head_dim)
    check_number("base", base, "a number greater than 1", lambda base: base > 1)
    if head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}; allowed: a multiple of 4")
    if positions.dim() != 2 or positions.shape[1] != 2:
        raise ValueError(f"positions has shape {tuple(positions.shape)}; allowed: (tokens, 2), row and column")
    count = head_dim // 4
    frequencies = torch.tensor(
        [math.pow(base, -i / count) for i in range(count)], dtype=torch.float32, device=positions.device
    )
    angles = (positions.to(torch.float32).unsqueeze(-1) * frequencies).flatten(1)
    return angles.cos(), angles.sin()

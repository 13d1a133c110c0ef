"""FusedTower: several towers look at the same images, and their channels stand side by side (Prismatic, Eagle)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.checks import check_floating

from .image_size import Size, check_size
from .pooling import resample_tokens


class FusedTower(nn.Module):
    """Tokens of several fixed-size towers, joined along the channels.

    Args:
        towers: at least one; each takes (images, channels, height, width) and has ``grid_of``.
        grid: (rows, columns) that every tower's tokens are resampled to (bilinear, widened where it shrinks); None
            asks for equal grids and raises where they differ.

    Attributes:
        hidden_size, out_channels: the sum of the towers' ``out_channels``.
        num_prefix_tokens: 0; each tower has left its own out.
        patch_size: the first tower's.
    """

    def __init__(self, towers: Sequence[nn.Module], *, grid: Size | None = None) -> None:
        super().__init__()
        if not isinstance(towers, (Sequence, nn.ModuleList)) or isinstance(towers, str):
            raise TypeError(f"towers is {type(towers).__name__}; allowed: a list of towers")
        if not len(towers):
            raise ValueError("towers is empty; allowed: at least one tower")
        for index, tower in enumerate(towers):
            if not isinstance(tower, nn.Module) or not hasattr(tower, "grid_of"):
                raise TypeError(f"towers[{index}] is {type(tower).__name__}; allowed: a tower for images of one size")
        if grid is not None:
            check_size("grid", grid)
        self.towers: Any = nn.ModuleList(towers)
        self.grid = None if grid is None else (grid[0], grid[1])
        channels: list[Any] = [tower.out_channels for tower in towers]
        self.out_channels: int = sum(channels)
        self.hidden_size = self.out_channels
        self.num_prefix_tokens = 0
        self.patch_size = towers[0].patch_size
        self.unused_tensors = tuple(name for tower in self.towers for name in getattr(tower, "unused_tensors", ()))

    def forward(self, pixel_values: Tensor | Sequence[Tensor]) -> Tensor:
        """Tokens of the images.

        Args:
            pixel_values: (images, channels, height, width) for all towers, or one such tensor a tower, where they
                want other sizes or another normalisation.

        Returns:
            (images, rows * columns, out_channels).

        Raises:
            ValueError, TypeError: another number of tensors than towers, other numbers of images, or grids that
                differ with no ``grid`` to resample to, naming both.
        """
        given = self._given(pixel_values)
        grids = [tower.grid_of(pixels) for tower, pixels in zip(self.towers, given, strict=True)]
        target = self.grid if self.grid is not None else grids[0]
        for index, grid in enumerate(grids):
            if self.grid is None and grid != target:
                raise ValueError(f"towers[{index}] has a grid {grid} and towers[0] {target}; give grid= to resample")
        parts = [
            resample_tokens(tower(pixels), grid, target)
            for tower, pixels, grid in zip(self.towers, given, grids, strict=True)
        ]
        return torch.cat(parts, dim=-1)

    def grid_of(self, pixel_values: Tensor | Sequence[Tensor]) -> Size:
        """(rows, columns) of the tokens."""
        if self.grid is not None:
            return self.grid
        return self.towers[0].grid_of(self._given(pixel_values)[0])

    def _given(self, pixel_values: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """A tensor a tower, of as many images each."""
        if isinstance(pixel_values, Tensor):
            return [pixel_values] * len(self.towers)
        if not isinstance(pixel_values, (list, tuple)):
            raise TypeError(
                f"pixel_values is {type(pixel_values).__name__}; allowed: a tensor, or a list of one a tower"
            )
        if len(pixel_values) != len(self.towers):
            raise ValueError(f"pixel_values has {len(pixel_values)} tensors; there are {len(self.towers)} towers")
        for index, pixels in enumerate(pixel_values):
            check_floating(f"pixel_values[{index}]", pixels, "a tensor (images, channels, height, width)")
            if pixels.shape[:1] != pixel_values[0].shape[:1]:
                raise ValueError(
                    f"pixel_values[{index}] has shape {tuple(pixels.shape)} and pixel_values[0] "
                    f"{tuple(pixel_values[0].shape)}; allowed: as many images for each tower"
                )
        return list(pixel_values)

    def extra_repr(self) -> str:
        return f"grid={self.grid}, out_channels={self.out_channels}"

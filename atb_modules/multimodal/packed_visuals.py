"""PackedVisuals: images and videos of any size as patches in one sequence, each with its grid (Qwen-VL)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.checks import check_floating, check_positive, check_tensor

from .visuals import Visual, VisualBatch

#: Patches (patches, values) and grids (n, 3), both or neither.
Pixels = tuple[Tensor | None, Tensor | None]


class PackedVisuals(VisualBatch):
    """Patches of visuals, one after the other.

    Args:
        patches: (patches, values).
        grids: int64 (visuals, 3), time steps, rows and columns of patches.
        visuals: the same after merging, as the language model sees them.
    """

    def __init__(self, patches: Tensor, grids: Tensor, visuals: list[Visual]) -> None:
        self.patches, self.grids, self.visuals = patches, grids, visuals
        self._edges = [0, *grids.prod(-1).cumsum(0).tolist()]

    def pixels(self, item: int) -> Tensor:
        return self.patches[self._edges[item] : self._edges[item + 1]]

    def select(self, items: Sequence[int]) -> PackedVisuals:
        patches = torch.cat([self.pixels(item) for item in items]) if items else self.patches[:0]
        return PackedVisuals(patches, self.grids[list(items)], [self.visuals[item] for item in items])


def pack_visuals(
    images: Pixels,
    videos: Pixels,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    *,
    merge_size: int,
    frames_apart: bool = False,
    tokens_per_second: float | None = None,
) -> PackedVisuals:
    """Images and videos, each given as patches (patches, values) and grids (n, 3), as one batch: images first.

    Args:
        second_per_grid_ts: seconds of a time step of each video; default 1.
        merge_size: patches a side of a token.
        frames_apart: whether each time step of a video is a visual of its own.
        tokens_per_second: positions a second; None for one a time step.

    Raises:
        ValueError, TypeError: grids without patches or the other way round, that do not have as many patches, or that
            merge_size does not divide; not one duration a video.
    """
    parts, grids, visuals = [], [], []
    for kind, names, given in (
        ("image", ("pixel_values", "image_grid_thw"), images),
        ("video", ("pixel_values_videos", "video_grid_thw"), videos),
    ):
        if given[0] is None and given[1] is None:
            if kind == "video":
                _time_steps(second_per_grid_ts, 0, None)
            continue
        patches, grid = _checked(names, given, merge_size)
        steps = [1.0] * len(grid)
        if kind == "video":
            steps = _time_steps(second_per_grid_ts, len(grid), tokens_per_second)
            if frames_apart:
                steps = [step for step, (time, _, _) in zip(steps, grid.tolist(), strict=True) for _ in range(time)]
                grid = grid.repeat_interleave(grid[:, 0], 0)
                grid[:, 0] = 1
        for (time, high, wide), step in zip(grid.tolist(), steps, strict=True):
            visuals.append(Visual(kind, (time, high // merge_size, wide // merge_size), step))
        parts.append(patches)
        grids.append(grid)
    if not parts:
        return PackedVisuals(torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64), [])
    return PackedVisuals(torch.cat(parts), torch.cat(grids), visuals)


def _checked(names: tuple[str, str], given: Pixels, merge_size: int) -> tuple[Tensor, Tensor]:
    patches, grid = given
    if patches is None or grid is None:
        missing = names[0] if patches is None else names[1]
        raise ValueError(f"{missing} is None; allowed: {names[0]} and {names[1]}, or neither")
    check_floating(names[0], patches)
    check_tensor(names[1], grid, "a tensor of integers (n, 3)")
    if grid.dtype not in (torch.int64, torch.int32) or grid.dim() != 2 or grid.shape[1] != 3:
        raise ValueError(f"{names[1]} is {grid.dtype} {tuple(grid.shape)}; allowed: integers (n, 3)")
    grid = grid.long().cpu()
    for number, (time, high, wide) in enumerate(grid.tolist()):
        if min(time, high, wide) < 1 or high % merge_size or wide % merge_size:
            raise ValueError(
                f"{names[1]}[{number}] is {(time, high, wide)}; allowed: positive, with rows and columns that "
                f"merge_size {merge_size} divides"
            )
    total = int(grid.prod(-1).sum())
    if patches.dim() != 2 or patches.shape[0] != total:
        raise ValueError(
            f"{names[0]} has shape {tuple(patches.shape)}; {names[1]} has {total} patches in {len(grid)} grids, "
            f"allowed: ({total}, values)"
        )
    return patches, grid


def _time_steps(
    second_per_grid_ts: Tensor | Sequence[float] | None, videos: int, tokens_per_second: float | None
) -> list[float]:
    seconds: Sequence[float] = [1.0] * videos
    if second_per_grid_ts is not None:
        given = second_per_grid_ts.tolist() if isinstance(second_per_grid_ts, Tensor) else second_per_grid_ts
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise TypeError(f"second_per_grid_ts is {given!r:.80}; allowed: a number of seconds for each video")
        for number, value in enumerate(given):
            check_positive(f"second_per_grid_ts[{number}]", value)
        if len(given) != videos:
            raise ValueError(f"second_per_grid_ts has {len(given)} numbers; video_grid_thw has {videos} videos")
        seconds = given
    # Without a rate, time steps are counted, whatever they last.
    return [1.0 if tokens_per_second is None else value * tokens_per_second for value in seconds]

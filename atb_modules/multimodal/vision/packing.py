"""Images of any size in one sequence: grids, segments, merge-block order, windows, and cutting pixels into patches.

A grid is a row (frames, rows, columns) of int64, counted in patches. A processor feeds the patches of an image frame
by frame, and within a frame by blocks of merge x merge patches, as a projector merges them later:

    merge 2, grid (1, 4, 4):    0  1 |  4  5
                                2  3 |  6  7
                                -----+------
                                8  9 | 12 13
                               10 11 | 14 15
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules.checks import check_bool, check_floating, check_int, check_tensor

GridTHW = tuple[int, int, int]


def read_grids(grid_thw: Tensor, patches: int | None = None, merge_size: int = 1) -> tuple[GridTHW, ...]:
    """The grids as numbers, checked.

    Args:
        grid_thw: int64 (images, 3).
        patches: how many patches they must make together, None where that is not known.
        merge_size: must divide rows and columns.

    Raises:
        ValueError, TypeError: naming the image and both numbers.
    """
    check_tensor("grid_thw", grid_thw, "an int64 tensor (images, 3)")
    if grid_thw.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"grid_thw is {grid_thw.dtype}; allowed: torch.int64")
    if grid_thw.device.type == "meta":
        raise ValueError("grid_thw is on meta; allowed: a tensor with data, it decides about shapes")
    if grid_thw.dim() != 2 or grid_thw.shape[1] != 3:
        raise ValueError(f"grid_thw has shape {tuple(grid_thw.shape)}; allowed: (images, 3), frames, rows and columns")
    grids = tuple((t, h, w) for t, h, w in grid_thw.tolist())
    _check_grids("grid_thw", grids, merge_size)
    total = sum(t * h * w for t, h, w in grids)
    if patches is not None and total != patches:
        raise ValueError(f"pixel_values has {patches} patches; grid_thw makes {total}")
    return grids


def _check_grids(name: str, grids: Sequence[GridTHW], merge_size: int = 1) -> None:
    """Raises unless each grid is (frames, rows, columns), the last two multiples of ``merge_size``."""
    check_int("merge_size", merge_size)
    if not isinstance(grids, (tuple, list)):
        raise TypeError(f"{name} is {type(grids).__name__}; allowed: a list of (frames, rows, columns)")
    for index, grid in enumerate(grids):
        whole = isinstance(grid, (tuple, list)) and len(grid) == 3 and all(type(side) is int for side in grid)
        if not whole or min(grid) < 1:
            raise ValueError(f"{name}[{index}] is {grid!r:.80}; allowed: at least 1 frame, row and column")
        for side, what in zip(grid[1:], ("rows", "columns"), strict=True):
            if side % merge_size:
                raise ValueError(f"{name}[{index}] has {side} {what}, which merge_size {merge_size} does not divide")


def frame_starts(grids: Sequence[GridTHW], device: torch.device | str | None = None) -> Tensor:
    """int32 (frames + 1,): where each frame of each image begins; frames are what attends to itself."""
    _check_grids("grids", grids)
    lengths = [h * w for t, h, w in grids for _ in range(t)]
    return F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)


def merge_order(rows: int, columns: int, merge_size: int, device: torch.device | str | None = None) -> Tensor:
    """int64 (rows * columns,): the raster numbers of one frame's patches, in the order in which they are fed."""
    check_int("merge_size", merge_size)
    for name, side in (("rows", rows), ("columns", columns)):
        check_int(name, side)
        if side % merge_size:
            raise ValueError(f"{name} is {side}, which merge_size {merge_size} does not divide")
    raster = torch.arange(rows * columns, device=device)
    if merge_size == 1:
        return raster
    blocks = raster.view(rows // merge_size, merge_size, columns // merge_size, merge_size)
    return blocks.transpose(1, 2).flatten()


def patch_positions(grids: Sequence[GridTHW], merge_size: int, device: torch.device | str | None = None) -> Tensor:
    """int64 (patches, 2): row and column of every patch within its frame, in the order in which they are fed."""
    _check_grids("grids", grids, merge_size)
    parts = []
    for t, h, w in grids:
        order = merge_order(h, w, merge_size, device)
        parts.append(torch.stack((order // w, order % w), dim=-1).repeat(t, 1))
    return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Windows:
    """A partition of packed patches into square windows.

    Attributes:
        order: int64 (blocks,): merge blocks, window after window.
        inverse: int64 (blocks,): what puts them back.
        cu_seqlens: int32 (windows + 1,): where each window begins, in patches; no window is empty.
        block: patches in a merge block.
    """

    order: Tensor
    inverse: Tensor
    cu_seqlens: Tensor
    block: int

    def gather(self, tokens: Tensor) -> Tensor:
        """Packed tokens (patches, ...) window after window."""
        return _by_blocks(tokens, self.order, self.block)

    def scatter(self, tokens: Tensor) -> Tensor:
        """Back to the order in which they were fed."""
        return _by_blocks(tokens, self.inverse, self.block)


def _by_blocks(tokens: Tensor, order: Tensor, block: int) -> Tensor:
    check_tensor("tokens", tokens, "a tensor (patches, ...)")
    if not tokens.dim() or tokens.shape[0] != order.numel() * block:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; the windows are of {order.numel() * block} patches")
    return tokens.unflatten(0, (order.numel(), block)).index_select(0, order).flatten(0, 1)


def window_partition(
    grids: Sequence[GridTHW], merge_size: int, window: int, device: torch.device | str | None = None
) -> Windows:
    """Windows of ``window`` x ``window`` merge blocks within each frame, the last ones cut off (Qwen2.5-VL).

    Args:
        grids: of the images, see ``read_grids``.
        merge_size: side of a merge block in patches.
        window: side of a window in merge blocks.
    """
    _check_grids("grids", grids, merge_size)
    check_int("window", window)
    numbers, begin = [], 0
    for t, h, w in grids:
        rows, columns = h // merge_size, w // merge_size
        across = -(-columns // window)
        down = -(-rows // window)
        row = torch.arange(rows) // window
        column = torch.arange(columns) // window
        frame = (row[:, None] * across + column).flatten()
        numbers.append((begin + torch.arange(t)[:, None] * (down * across) + frame).flatten())
        begin += t * down * across
    number = torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.int64)
    order = number.argsort(stable=True)
    lengths = torch.bincount(number, minlength=begin) * merge_size**2
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return Windows(order.to(device), inverse.to(device), starts.to(device), merge_size**2)


def pack_images(
    images: Sequence[Tensor],
    patch_size: int,
    *,
    merge_size: int = 1,
    temporal_patch_size: int = 1,
    channels_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Images of any size as one sequence of patches.

    Args:
        images: each (C, H, W), or a video (frames, C, H, W); H and W multiples of patch_size * merge_size. A video
            whose frames do not fill the last temporal patch repeats its last one; an image fills one by itself.
        patch_size, merge_size, temporal_patch_size: of the tower.
        channels_last: whether a patch's values lie (frame, row, column, channel), as SigLIP2 NaFlex takes them.

    Returns:
        patches (patches, C * T * P * P) in a kernel's order (channel, frame, row, column), and grid_thw int64
        (images, 3).

    Raises:
        ValueError, TypeError: naming the image and both numbers.
    """
    for name, value in (
        ("patch_size", patch_size),
        ("merge_size", merge_size),
        ("temporal_patch_size", temporal_patch_size),
    ):
        check_int(name, value)
    check_bool("channels_last", channels_last)
    if not isinstance(images, (Sequence, Tensor)) or isinstance(images, str):
        raise TypeError(f"images is {type(images).__name__}; allowed: a list of tensors")
    if not len(images):
        raise ValueError("images is empty; allowed: at least one image")
    parts, grids = [], []
    for index, image in enumerate(images):
        check_floating(f"images[{index}]", image, "a tensor (C, H, W) or (frames, C, H, W)")
        if image.dim() not in (3, 4) or 0 in image.shape:
            raise ValueError(f"images[{index}] has shape {tuple(image.shape)}; allowed: (C, H, W), (frames, C, H, W)")
        frames = image if image.dim() == 4 else image.unsqueeze(0)
        if frames.shape[1] != (images[0].shape[-3]):
            raise ValueError(
                f"images[{index}] has {frames.shape[1]} channels; images[0] has {images[0].shape[-3]}, must be equal"
            )
        if image.device != images[0].device:
            raise ValueError(f"images[{index}] is on {image.device}; images[0] is on {images[0].device}, must be equal")
        patches, grid = _frame_patches(frames, index, patch_size, merge_size, temporal_patch_size, channels_last)
        parts.append(patches)
        grids.append(grid)
    return torch.cat(parts), torch.tensor(grids, dtype=torch.int64, device=parts[0].device)


def pad_frames(frames: Tensor, temporal_patch_size: int) -> Tensor:
    """Frames (T, ...) with the last one repeated up to a multiple of ``temporal_patch_size``."""
    check_tensor("frames", frames, "a tensor (frames, ...)")
    check_int("temporal_patch_size", temporal_patch_size)
    if not frames.dim() or not frames.shape[0]:
        raise ValueError(f"frames has shape {tuple(frames.shape)}; allowed: at least one frame")
    missing = -frames.shape[0] % temporal_patch_size
    return torch.cat((frames, frames[-1:].expand(missing, *frames.shape[1:]))) if missing else frames


def _frame_patches(
    frames: Tensor, index: int, patch_size: int, merge_size: int, temporal_patch_size: int, channels_last: bool
) -> tuple[Tensor, GridTHW]:
    factor = patch_size * merge_size
    for side, name in zip(frames.shape[-2:], ("high", "wide"), strict=True):
        if side % factor:
            raise ValueError(
                f"images[{index}] is {side} pixels {name}, which patch_size x merge_size {factor} does not divide"
            )
    frames = pad_frames(frames, temporal_patch_size)
    grid = (frames.shape[0] // temporal_patch_size, frames.shape[-2] // patch_size, frames.shape[-1] // patch_size)
    t, h, w = grid
    cut = frames.reshape(
        t,
        temporal_patch_size,
        frames.shape[1],
        h // merge_size,
        merge_size,
        patch_size,
        w // merge_size,
        merge_size,
        patch_size,
    )
    # (t, T, C, hb, hm, p, wb, wm, p) -> (t, hb, wb, hm, wm | C, T, p, p), or | T, p, p, C
    values = (1, 5, 8, 2) if channels_last else (2, 1, 5, 8)
    return cut.permute(0, 3, 6, 4, 7, *values).reshape(t * h * w, -1), grid


def unpad_patches(pixel_values: Tensor, pixel_attention_mask: Tensor, spatial_shapes: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' padded batch of SigLIP2 NaFlex as packed patches.

    Args:
        pixel_values: (images, max_patches, values), padded behind.
        pixel_attention_mask: (images, max_patches), 1 = real.
        spatial_shapes: integers (images, 2), rows and columns.

    Returns:
        patches (patches, values) and grid_thw int64 (images, 3).
    """
    for name, tensor in (("pixel_values", pixel_values), ("pixel_attention_mask", pixel_attention_mask)):
        check_tensor(name, tensor)
    check_tensor("spatial_shapes", spatial_shapes)
    if spatial_shapes.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"spatial_shapes is {spatial_shapes.dtype}; allowed: torch.int64, torch.int32")
    if pixel_values.dim() != 3 or pixel_attention_mask.shape != pixel_values.shape[:2]:
        raise ValueError(
            f"pixel_values has shape {tuple(pixel_values.shape)} and pixel_attention_mask "
            f"{tuple(pixel_attention_mask.shape)}; allowed: (images, max_patches, values) and (images, max_patches)"
        )
    if tuple(spatial_shapes.shape) != (pixel_values.shape[0], 2):
        raise ValueError(
            f"spatial_shapes has shape {tuple(spatial_shapes.shape)}; allowed: ({pixel_values.shape[0]}, 2)"
        )
    if bool((spatial_shapes < 1).any()):
        raise ValueError(f"spatial_shapes is {spatial_shapes.tolist()}; allowed: at least 1 row and column")
    counts = spatial_shapes.long().prod(-1)
    real = pixel_attention_mask != 0
    expected = torch.arange(pixel_values.shape[1], device=counts.device) < counts.unsqueeze(-1)
    if not torch.equal(real, expected.to(real.device)):
        raise ValueError(
            f"pixel_attention_mask has {real.sum(-1).tolist()} real patches; spatial_shapes makes {counts.tolist()}, "
            "the first ones of each image"
        )
    shapes = spatial_shapes.long()
    return pixel_values[real], torch.cat((torch.ones_like(shapes[:, :1]), shapes), dim=-1)

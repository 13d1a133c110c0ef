"""M-RoPE: positions of three axes (time, height, width) for text, images and videos. Qwen2-VL, section 2.1.

Text has one position on all axes. An image at position p of 2 x 3 tokens takes (p, p + row, p + column), and the text
behind it goes on after the greatest of these::

    token   a  b  [ image of 2 x 3  ]  c  d
    time    0  1  2  2  2  2  2  2    5  6
    height  0  1  2  2  2  3  3  3    5  6
    width   0  1  2  3  4  2  3  4    5  6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from atb_modules.strategies import parse_enum


class MRoPEAdvance(StrEnum):
    """Where text resumes after an image or a video at position p.

    MAX: one after the greatest position of all axes, as Qwen trained and transformers to 4.57 has it. SPATIAL: at
    p + max(height, width), as transformers 5 has it; it differs for a video with more time steps than rows and columns.
    Generated tokens go on behind the last one as its ``generate`` has it, not after the greatest position of the row,
    which its forward with a cache takes.
    """

    MAX = "max"
    SPATIAL = "spatial"


@dataclass(frozen=True)
class VisionBlock:
    """An image or a video in a row of tokens.

    Args:
        start: its first token.
        grid: tokens in time, height and width, after merging; their product is its number of tokens.
        time_step: positions from one time step to the next, truncated after it was multiplied (Qwen2.5-VL: tokens a
            second times seconds a step).
    """

    start: int
    grid: tuple[int, int, int]
    time_step: float = 1.0

    @property
    def length(self) -> int:
        time, height, width = self.grid
        return time * height * width

    def positions(self, start: int) -> Tensor:
        """int64 (3, length), from position ``start`` on."""
        time, height, width = self.grid
        times = (torch.arange(time) * self.time_step).long()
        axes = torch.meshgrid(times, torch.arange(height), torch.arange(width), indexing="ij")
        return torch.stack(axes).reshape(3, -1) + start


def mrope_positions(
    length: int, blocks: Sequence[VisionBlock], *, advance: MRoPEAdvance | str = MRoPEAdvance.MAX
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Positions of a row of tokens, and by how much text is ahead of its token numbers.

    Args:
        length: tokens in the row.
        blocks: its images and videos, in order; they may stand side by side.
        advance: a ``MRoPEAdvance`` or its word.

    Returns:
        positions int64 (3, length), and pairs (token, shift): from that token on, text stands at its number plus shift;
        see ``KVCacheManager.shift_positions``. Tokens that are generated stand where text of the prompt would.

    Raises:
        ValueError: blocks that overlap, or pass the end.
    """
    advance = parse_enum(MRoPEAdvance, advance, "advance")
    parts, shifts = [], []
    token = position = 0
    for block in blocks:
        if block.start < token or block.start + block.length > length:
            raise ValueError(
                f"blocks has {block.length} tokens at {block.start}; allowed: from {token}, where the one before ends, "
                f"to the row's {length} tokens"
            )
        text = block.start - token
        parts.append((torch.arange(text) + position).expand(3, -1))
        position += text
        parts.append(block.positions(position))
        if advance is MRoPEAdvance.SPATIAL:
            position += max(block.grid[1:])
        elif block.length:
            position = int(parts[-1].max()) + 1
        token = block.start + block.length
        shifts.append((token, position - token))
    parts.append((torch.arange(length - token) + position).expand(3, -1))
    return torch.cat(parts, dim=1), shifts

"""What else decides which key a query may see, and is data: packed segments, images, live blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules import masks
from atb_modules.checks import check_tensor


@dataclass(frozen=True)
class Overlays:
    """The tensors beside an ``AttentionSpec``; all on one device.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (segments + 1,), where each sequence of a packed batch begins among the
            queries and among the keys; both or neither. A query sees its own segment alone.
        image_ids: int (batch or 1, kv_len): equal numbers >= 0 side by side are one image, whose tokens see each
            other whatever causality and window say (Gemma 3); negative numbers are text.
        block_mask: bool (batch or 1, num_heads or 1, q_blocks, kv_blocks), True where a block of ``block_size`` queries
            and keys is live; the last blocks may be cut short.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    image_ids: Tensor | None = None
    block_mask: Tensor | None = None

    def __bool__(self) -> bool:
        return any(t is not None for t in (self.cu_seqlens_q, self.image_ids, self.block_mask))

    def check(self, batch: int, num_heads: int, q_len: int, kv_len: int, block_size: int | None) -> None:
        """Raise ValueError or TypeError unless all fit a call of these sizes."""
        if (self.cu_seqlens_q is None) != (self.cu_seqlens_k is None):
            given = "cu_seqlens_q" if self.cu_seqlens_k is None else "cu_seqlens_k"
            raise ValueError(f"{given} is given alone; allowed: cu_seqlens_q and cu_seqlens_k, or neither")
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            for name, starts, total in (
                ("cu_seqlens_q", self.cu_seqlens_q, q_len),
                ("cu_seqlens_k", self.cu_seqlens_k, kv_len),
            ):
                _check_starts(name, starts, total)
            if self.cu_seqlens_q.shape != self.cu_seqlens_k.shape:
                raise ValueError(
                    f"cu_seqlens_q has {self.cu_seqlens_q.numel() - 1} segments and cu_seqlens_k "
                    f"{self.cu_seqlens_k.numel() - 1}; they must be equal"
                )
            if batch != 1:
                raise ValueError(f"q has batch {batch} with cu_seqlens_q; allowed: 1, a packed batch is one row")
        if self.image_ids is not None:
            check_tensor("image_ids", self.image_ids)
            if self.image_ids.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"image_ids is {self.image_ids.dtype}; allowed: torch.int32, torch.int64")
            if self.image_ids.dim() != 2 or tuple(self.image_ids.shape) not in ((batch, kv_len), (1, kv_len)):
                raise ValueError(
                    f"image_ids has shape {tuple(self.image_ids.shape)}; allowed: ({batch}, {kv_len}) or (1, {kv_len})"
                )
        if (self.block_mask is None) != (block_size is None):
            given = "block_mask" if block_size is None else "the spec's block_size"
            raise ValueError(
                f"{given} is given alone; allowed: a block_mask with a spec that has block_size, or neither"
            )
        if self.block_mask is not None and block_size is not None:
            check_tensor("block_mask", self.block_mask)
            if self.block_mask.dtype != torch.bool:
                raise TypeError(f"block_mask is {self.block_mask.dtype}; allowed: torch.bool")
            blocks = -(-q_len // block_size), -(-kv_len // block_size)
            shape = tuple(self.block_mask.shape)
            if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, num_heads) or shape[2:] != blocks:
                raise ValueError(
                    f"block_mask has shape {shape}; allowed: (1 or {batch}, 1 or {num_heads}, {blocks[0]}, {blocks[1]})"
                )

    def segments(self, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For every query its segment's number, and where that begins and ends among the keys; every key's segment."""
        assert self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        k_starts = self.cu_seqlens_k.long()
        q_segment = _segment_of(self.cu_seqlens_q.long(), q_len)
        return q_segment, k_starts[q_segment], k_starts[q_segment + 1], _segment_of(k_starts, kv_len)

    def positions(self, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor | int]:
        """Positions within the segments: queries (q_len, 1), keys (1, kv_len), and keys less queries (q_len, 1)."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return *masks.positions(q_len, kv_len, self.device), kv_len - q_len
        q_starts, k_starts = self.cu_seqlens_q.long(), self.cu_seqlens_k.long()
        q_segment, begin, end, k_segment = self.segments(q_len, kv_len)
        place = torch.arange(q_len, device=q_starts.device) - q_starts[q_segment + 1] + (end - begin)
        keys = torch.arange(kv_len, device=k_starts.device) - k_starts[k_segment]
        more = (k_starts.diff() - q_starts.diff())[q_segment]
        return place.unsqueeze(-1), keys.unsqueeze(0), more.unsqueeze(-1)

    def join(self, visible: Tensor, q_pos: Tensor, block_size: int | None) -> Tensor:
        """``visible`` (q_len, kv_len) with images, segments and live blocks: (batch or 1, heads or 1, q_len, kv_len).

        q_pos: (q_len, 1), where each query stands in its segment.
        """
        q_len, kv_len = visible.shape
        visible = visible[None, None]
        place, end = q_pos.squeeze(-1), torch.full_like(q_pos.squeeze(-1), kv_len)
        begin = torch.zeros_like(end)
        if self.cu_seqlens_q is not None:
            q_segment, begin, end, k_segment = self.segments(q_len, kv_len)
            place = place + begin
        if self.image_ids is not None:
            images = self.images()
            outside = (place < begin) | (place >= end)
            mine = images[:, place.clamp(0, kv_len - 1)].masked_fill(outside, -1)
            visible = visible | masks.same_image(mine[:, None, :, None], images[:, None, None, :])
        if self.cu_seqlens_q is not None:
            visible = visible & masks.same_segment(q_segment[:, None], k_segment[None])
        if self.block_mask is not None:
            assert block_size is not None
            live = self.block_mask.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)
            visible = visible & live[..., :q_len, :kv_len]
        return visible

    def query_blocks(self, group: int, most: int) -> Tensor | None:
        """int64 cuts of ``group`` lanes a query into blocks of at most ``most`` lanes, none across two segments.

        None without segments, or where their values cannot be read (while tracing).
        """
        if self.cu_seqlens_q is None or torch.compiler.is_compiling():
            return None
        edges = self.cu_seqlens_q.tolist()
        starts: list[int] = []
        for begin, end in itertools.pairwise(edges):
            starts.extend(range(begin * group, end * group, most))
        return torch.tensor([*starts, edges[-1] * group])

    def images(self) -> Tensor:
        """(batch or 1, kv_len): the run of equal image ids that each key belongs to, -1 for text."""
        assert self.image_ids is not None
        ids = self.image_ids
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return starts.cumsum(-1).masked_fill(ids < 0, -1)

    @property
    def device(self) -> torch.device | None:
        given = next((t for t in (self.cu_seqlens_q, self.image_ids, self.block_mask) if t is not None), None)
        return None if given is None else given.device


def _segment_of(starts: Tensor, total: int) -> Tensor:
    """The segment of each of ``total`` tokens; empty segments own none."""
    return torch.repeat_interleave(
        torch.arange(starts.numel() - 1, device=starts.device), starts.diff(), output_size=total
    )


def _check_starts(name: str, starts: Tensor, total: int) -> None:
    check_tensor(name, starts)
    if starts.dtype != torch.int32 or starts.dim() != 1 or not starts.numel():
        raise ValueError(f"{name} is {starts.dtype} {tuple(starts.shape)}; allowed: torch.int32 (segments + 1,)")
    if torch.compiler.is_compiling() or starts.device.type == "meta":
        return
    values = starts.tolist()
    if values[0] != 0 or values[-1] != total or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} is {values}; allowed: 0, rising, up to {total} tokens")

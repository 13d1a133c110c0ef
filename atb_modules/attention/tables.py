"""What slots, block tables and lengths may hold: native kernels follow them as addresses, so they are checked first.

Values are read on the CPU alone, and never while a call is traced.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from atb_modules.checks import check_floating, check_tensor
from atb_modules.kernels.pages import Pages
from atb_modules.spec import AttentionSpec


def check_devices(reference: str, device: torch.device, **tensors: Pages) -> None:
    """ValueError unless all tensors are on the device of the one named ``reference``."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; {reference} is on {device}, they must be equal")


def check_slots(slots: Tensor, tokens: int, num_slots: int) -> None:
    """ValueError unless slots are int64 (tokens,) of -1 or places below ``num_slots``."""
    check_tensor("slots", slots, f"a tensor torch.int64 ({tokens},)")
    if slots.dtype != torch.int64 or tuple(slots.shape) != (tokens,):
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}; allowed: torch.int64 ({tokens},)")
    if not _readable(slots) or not tokens:
        return
    low, high = int(slots.min()), int(slots.max())
    if low < -1 or high >= num_slots:
        raise ValueError(f"slots go from {low} to {high}; allowed: -1 (not written) to {num_slots - 1}")


def check_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """ValueError or TypeError unless q goes with k, and cos and sin with the tokens and channels of both."""
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        raise ValueError(
            f"q is {q.dtype} {tuple(q.shape)}; k is {k.dtype} {tuple(k.shape)}, they must be equal but for the heads"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_floating(name, table, "a tensor (tokens, rotary_dim / 2)")
        if table.device != k.device:
            raise ValueError(f"{name} is on {table.device}; k is on {k.device}, they must be equal")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != k.shape[0] or 2 * cos.shape[1] > k.shape[2]:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; k of shape {tuple(k.shape)} allows "
            f"({k.shape[0]}, at most {k.shape[2] // 2}) for both"
        )


def check_tables(
    block_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    spec: AttentionSpec,
    total: int,
    num_pages: int,
    page_size: int,
) -> None:
    """ValueError unless lengths fit the queries and the table, and every block that a query can see has a page."""
    if not all(_readable(tensor) for tensor in (block_table, kv_lengths, cu_seqlens_q)):
        return
    starts, lengths, table = cu_seqlens_q.tolist(), kv_lengths.tolist(), block_table.tolist()
    if starts[0] != 0 or starts[-1] != total or any(b < a for a, b in pairwise(starts)):
        raise ValueError(f"cu_seqlens_q is {starts}; allowed: from 0 up to {total}, the number of queries, never down")
    room = block_table.shape[1] * page_size
    for row, (length, blocks) in enumerate(zip(lengths, table, strict=True)):
        queries = starts[row + 1] - starts[row]
        if not queries <= length <= room:
            raise ValueError(
                f"kv_lengths[{row}] is {length}; with {queries} queries and room for {room} tokens in block_table, "
                f"allowed: {queries} to {room}"
            )
        if not queries:
            continue
        first = 0 if spec.left is None else max(length - queries - spec.left, 0) // page_size
        used = blocks[first : (length + page_size - 1) // page_size]
        if any(not 0 <= page < num_pages for page in used):
            raise ValueError(
                f"block_table[{row}] has {used} for what its queries see; allowed: pages 0 to {num_pages - 1}"
            )


def _readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and type(tensor) is Tensor

"""How large a cache may be: its memory reserved or refused with a name, and the most sequences it takes."""

from __future__ import annotations

import os
from typing import Any

import torch

from atb_modules.checks import check_device
from atb_modules.kernels.pages import KVQuantization, Pages, QuantizedPages, page_bytes

#: Most sequences that can be open in one cache.
MAX_ROWS = 65_536
#: Most layers of a cache.
MAX_LAYERS = 10_000
#: Bytes of Python objects that a page of a group costs, and of the first block tables a block.
_PAGE_BOOK, _BLOCK_BOOK = 48, 16


def reserve_pages(
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str | None,
    quantization: KVQuantization = KVQuantization.NONE,
) -> list[tuple[Pages, Pages]]:
    """Key and value pages of each layer, (num_pages, num_kv_heads, page_size, head_dim), not written.

    Raises:
        ValueError: the sizes ask for more memory than there is; the message has them, and the bytes.
    """
    check_device(device)
    size = page_bytes(page_size, num_kv_heads, head_dim, dtype, quantization)
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    asked = (
        f"num_layers={num_layers}, num_pages={num_pages}, num_kv_heads={num_kv_heads}, page_size={page_size} and "
        f"head_dim={head_dim} in {dtype} ask for "
        f"{2 * num_layers * num_pages * size} bytes"
    )
    if num_pages * size >= 2**63:
        raise ValueError(f"{asked}; allowed: less than {2**63} a tensor of keys or values")
    # Normal tensors even under inference_mode: an inference tensor could not be written outside of it.
    with torch.inference_mode(False):
        try:
            return [
                (_pool(shape, dtype, device, quantization), _pool(shape, dtype, device, quantization))
                for _ in range(num_layers)
            ]
        except torch.OutOfMemoryError:
            raise  # an accelerator says more of its memory than is known here
        except (MemoryError, RuntimeError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{asked}, which cannot be reserved: {first}") from None


def _pool(shape: tuple[int, ...], dtype: torch.dtype, device: Any, quantization: KVQuantization) -> Pages:
    if quantization is KVQuantization.NONE:
        return torch.empty(shape, dtype=dtype, device=device)
    return QuantizedPages(
        torch.empty(shape, dtype=torch.int8, device=device), torch.zeros(shape[:2], dtype=torch.float32, device=device)
    )


def check_books(num_layers: int, num_groups: int, max_seq_len: int, page_size: int, num_pages: int) -> None:
    """ValueError where the bookkeeping alone, page numbers and block tables, would be larger than the memory."""
    asked = num_groups * (num_pages * _PAGE_BOOK + -(-max_seq_len // page_size) * _BLOCK_BOOK)
    if asked > _memory():
        raise ValueError(
            f"num_layers={num_layers}, max_seq_len={max_seq_len}, page_size={page_size} and num_pages={num_pages} ask "
            f"for {asked} bytes of page numbers and block tables; this machine has {_memory()}"
        )


def check_rows(name: str, count: int, open_rows: int, max_blocks: int, num_groups: int) -> None:
    """ValueError where ``count`` sequences, the argument ``name``, are too many beside those that are open."""
    rows = open_rows + count
    if rows > MAX_ROWS:
        raise ValueError(
            f"{name} is {count} with {open_rows} open sequences to keep; allowed: {MAX_ROWS} sequences in a cache"
        )
    asked = 2 * rows * max_blocks * num_groups * torch.int32.itemsize
    if asked > 2**24 and asked > _memory():
        raise ValueError(
            f"{name} is {count}; block tables of {rows} sequences of {max_blocks} pages ask for {asked} bytes, this "
            f"machine has {_memory()}"
        )


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

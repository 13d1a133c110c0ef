"""Pages of keys or values: a plain tensor, or int8 codes with a scale for each page and head.

Every kernel over pages takes either; what touches the memory of a page by hand goes through the functions here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from atb_modules.checks import check_tensor

#: the largest code: symmetric, so that a value and its negative round alike
LARGEST_CODE = 127


class KVQuantization(StrEnum):
    """How a cache keeps keys and values."""

    NONE = "none"  # in the cache's dtype
    INT8 = "int8"  # symmetric codes, a float32 scale for each page and head


@dataclass(frozen=True, eq=False)
class QuantizedPages:
    """Keys or values as ``codes * scales``.

    The scale of a page and head is what its largest value needs, ``largest / 127``. A page fills a few tokens at a
    time: where new ones need a larger scale, the codes that are there are rounded to it once more. A value is off by at
    most half a step of the final scale for each time that it was rounded; a page written at once rounds every value
    once. Tokens are written to a page in order, and the first slot begins it anew.

    Args:
        codes: int8 (num_pages, kv_heads, page_size, head_dim).
        scales: float32 (num_pages, kv_heads).
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        codes, scales = self.codes, self.scales
        check_tensor("codes", codes)
        check_tensor("scales", scales)
        if codes.dim() != 4 or codes.dtype != torch.int8:
            raise ValueError(
                f"codes is {codes.dtype} {tuple(codes.shape)}; allowed: torch.int8 (num_pages, kv_heads, page_size, "
                "head_dim)"
            )
        if scales.shape != codes.shape[:2] or scales.dtype != torch.float32 or scales.device != codes.device:
            raise ValueError(
                f"scales is {scales.dtype} {tuple(scales.shape)} on {scales.device}; allowed: torch.float32 "
                f"{tuple(codes.shape[:2])} on {codes.device}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of all pages, (num_pages, kv_heads, page_size, head_dim)."""
        return self.codes.to(dtype) * self.scales.to(dtype)[:, :, None, None]


Pages = Tensor | QuantizedPages


def parts(pages: Pages) -> tuple[Tensor, Tensor | None]:
    """The memory of the pages, and their scales where they have some."""
    return (pages.codes, pages.scales) if isinstance(pages, QuantizedPages) else (pages, None)


def take_pages(pages: Pages, index: Tensor) -> Tensor:
    """The values of the pages ``index`` (n,): (n, kv_heads, page_size, head_dim), float32 where they are codes."""
    if isinstance(pages, QuantizedPages):
        return pages.codes[index].float() * pages.scales[index][:, :, None, None]
    return pages[index]


def take_tokens(pages: Pages, page: Tensor, offset: Tensor) -> Tensor:
    """The vectors of all heads at ``offset`` of ``page``, of one shape: (*shape, kv_heads, head_dim)."""
    if isinstance(pages, QuantizedPages):
        return pages.codes[page, :, offset].float() * pages.scales[page].unsqueeze(-1)
    return pages[page, :, offset]


def copy_page(pages: Pages, source: int, destination: int) -> None:
    """The page ``destination`` becomes what ``source`` is."""
    for memory in parts(pages):
        if memory is not None:
            memory[destination].copy_(memory[source])


def page_bytes(
    page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, quantization: KVQuantization
) -> int:
    """Bytes of one page of keys, or of values, with its scales."""
    values = num_kv_heads * page_size * head_dim
    if quantization is KVQuantization.INT8:
        return values + num_kv_heads * torch.float32.itemsize
    return values * dtype.itemsize

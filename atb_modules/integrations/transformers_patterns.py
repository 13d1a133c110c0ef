"""What a mask function of transformers says, read back from the closures that ``masking_utils`` builds.

transformers writes masks as functions of (batch, head, query, key) and joins them with ``and_masks`` and ``or_masks``.
``read`` takes such a function apart and returns a ``Pattern``; what it does not know raises ``Unread``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor


class Unread(Exception):
    """The mask has no compact form here; the message says which part of it."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which key a query sees, over positions counted from the beginning of the sequence.

    same segment and real key and ((causal and in window and same chunk) or same image)

    Args:
        causal: whether a query sees no later key.
        left, right: keys seen before and after the query at most; None is unbounded.
        chunk: size of the chunks that see only themselves.
        chunk_starts: int (batch,), where the first chunk of each row begins.
        images: int (batch, positions), equal numbers >= 0 see each other.
        image_left: a window that was laid over the images too.
        is_overlay: images alone, which make sense only beside another pattern.
        segments: int (batch, positions), the packed sequence of each token.
        places: int (batch, positions), each token's place in its packed sequence, where the pattern counts those.
        real: bool (batch, positions) tensors, all of which must be True for a key to be seen.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    chunk_starts: Tensor | None = None
    images: Tensor | None = None
    image_left: int | None = None
    is_overlay: bool = False
    segments: Tensor | None = None
    places: Tensor | None = None
    real: tuple[Tensor, ...] = ()


def read(mask_function: Callable[..., Any]) -> Pattern:
    """The pattern of a mask function of transformers; raises ``Unread`` where it is not one that is known."""
    code = getattr(mask_function, "__code__", None)
    reader = _readers().get(code) if isinstance(code, CodeType) else None
    if not isinstance(code, CodeType) or reader is None:
        raise Unread(f"the mask function {getattr(mask_function, '__qualname__', mask_function)!s} is not known")
    cells = getattr(mask_function, "__closure__", None) or ()
    return reader(**{name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)})


@functools.cache
def _readers() -> dict[CodeType, Callable[..., Pattern]]:
    """The code of each function that ``masking_utils`` builds, and what reads its closure."""
    from transformers import masking_utils as theirs

    nothing = torch.zeros(1, 1, dtype=torch.long)
    causal = theirs.causal_mask_function
    return {
        causal.__code__: lambda: Pattern(causal=True),
        theirs.bidirectional_mask_function.__code__: Pattern,
        theirs.sliding_window_overlay(1).__code__: lambda sliding_window: Pattern(left=sliding_window - 1),
        theirs.sliding_window_bidirectional_overlay(1).__code__: lambda sliding_window: Pattern(
            left=sliding_window, right=sliding_window
        ),
        theirs.chunked_overlay(1, nothing).__code__: lambda chunk_size, left_padding: Pattern(
            chunk=chunk_size, chunk_starts=left_padding
        ),
        theirs.blockwise_overlay(nothing).__code__: lambda block_sequence_ids: Pattern(
            images=block_sequence_ids, is_overlay=True
        ),
        theirs.packed_sequence_mask_function(nothing).__code__: lambda packed_sequence_mask: Pattern(
            segments=packed_sequence_mask
        ),
        theirs.padding_mask_function(nothing).__code__: lambda padding_mask: Pattern(real=(padding_mask,)),
        theirs.remap_positions_for_packed_sequence(causal, nothing).__code__: _read_remapped,
        theirs.and_masks(causal).__code__: lambda mask_functions: functools.reduce(_both, map(read, mask_functions)),
        theirs.or_masks(causal).__code__: lambda mask_functions: _either([read(f) for f in mask_functions]),
    }


def _read_remapped(mask_function: Callable[..., Any], position_ids: Tensor) -> Pattern:
    inner = read(mask_function)
    if inner.images is not None or inner.segments is not None or inner.places is not None or inner.real:
        raise Unread("data is indexed with the positions of packed sequences")
    return dataclasses.replace(inner, places=position_ids)


def _both(a: Pattern, b: Pattern) -> Pattern:
    """The intersection: each part from the side that has it."""
    if a.is_overlay or b.is_overlay:
        raise Unread("images see nothing but themselves")
    for name in ("chunk", "images", "segments", "places"):
        if getattr(a, name) is not None and getattr(b, name) is not None:
            raise Unread(f"{name} are given twice")
    images, other = (a, b) if a.images is not None else (b, a)
    if images.images is not None and (other.causal or other.right is not None or other.chunk is not None):
        raise Unread("causality or chunks are laid over images")
    return Pattern(
        causal=a.causal or b.causal,
        left=_least(a.left, b.left),
        right=_least(a.right, b.right),
        chunk=a.chunk if a.chunk is not None else b.chunk,
        chunk_starts=a.chunk_starts if a.chunk is not None else b.chunk_starts,
        images=images.images,
        image_left=_least(images.image_left, other.left) if images.images is not None else None,
        segments=a.segments if a.segments is not None else b.segments,
        places=a.places if a.places is not None else b.places,
        real=(*a.real, *b.real),
    )


def _either(patterns: list[Pattern]) -> Pattern:
    """The union of one pattern with images; any other union is not known."""
    plain = [p for p in patterns if not p.is_overlay]
    overlays = [p for p in patterns if p.is_overlay]
    if len(plain) != 1 or len(overlays) != 1 or not plain[0].causal:
        raise Unread("a union is known only of a causal mask with images")
    base = plain[0]
    if base.images is not None or base.segments is not None or base.real:
        raise Unread("images are added to a mask that has images, packed sequences or padding")
    return dataclasses.replace(base, images=overlays[0].images)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)

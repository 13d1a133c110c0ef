"""What is computed: the frozen, static structure of an attention call. No tensor, no device, no backend."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atb_modules import masks
from atb_modules.checks import LARGEST_COUNT, check_int
from atb_modules.strategies import parse_enum

if TYPE_CHECKING:
    from atb_modules.overlays import Overlays


class Causal(StrEnum):
    """Whether a query sees later keys, and how queries and keys of different number are aligned."""

    NONE = "none"
    BOTTOM_RIGHT = "bottom_right"  # the last query sees the last key: a continuation of a cached prefix
    TOP_LEFT = "top_left"  # the first query sees the first key alone: what torch's is_causal means


@dataclass(frozen=True)
class AttentionSpec:
    """The static structure of one attention call.

    Args:
        causal: a ``Causal`` member or its word; True means bottom-right, False none.
        window: inclusive ``(left, right)`` numbers of keys before and after the query, itself not counted; None on a
            side is unbounded. A Hugging Face ``sliding_window=W`` is ``(W - 1, None)``.
        scale: what the scores are multiplied with; None is ``1 / sqrt(head_dim)``.
        softcap: ``cap * tanh(score / cap)`` on the scaled scores, before masks and biases (Gemma 2).
        global_tokens: the first tokens of the sequence (of each segment) that see all and are seen by all; in a causal
            call they see and are seen by what causality allows (Longformer, BigBird; attention sinks as tokens).
        prefix: the first keys, seen by every query whatever causality and window say (prefix-LM, PaliGemma).
        chunk: chunked local attention, runs of so many positions that see only themselves (Llama 4).
        block_size: edge of the blocks of a ``block_mask``.

    How these combine is written and drawn in ``atb_modules.masks``.
    """

    causal: Causal | str | bool = Causal.NONE
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    global_tokens: int = 0
    prefix: int = 0
    chunk: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        word = self.causal
        if isinstance(word, bool):
            word = Causal.BOTTOM_RIGHT if word else Causal.NONE
        object.__setattr__(self, "causal", parse_enum(Causal, word, "causal"))
        object.__setattr__(self, "window", _checked_window(self.window))
        if self.scale is not None:
            object.__setattr__(self, "scale", _finite_float(self.scale, "scale"))
        if self.softcap is not None:
            object.__setattr__(self, "softcap", _finite_float(self.softcap, "softcap"))
            if self.softcap <= 0:
                raise ValueError(f"softcap is {self.softcap!r}; allowed: a positive number, or None for no cap")
        for name in ("global_tokens", "prefix"):
            check_int(name, getattr(self, name), least=0)
        for name in ("chunk", "block_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))

    @property
    def is_causal(self) -> bool:
        return self.causal is not Causal.NONE

    @property
    def left(self) -> int | None:
        """Keys visible before the query, None if unbounded."""
        return self.window[0] if self.window is not None else None

    @property
    def right(self) -> int | None:
        """Keys visible after the query, None if unbounded; 0 where the call is causal."""
        right = self.window[1] if self.window is not None else None
        return 0 if self.is_causal else right

    @property
    def has_overlays(self) -> bool:
        """Whether more than causality and a window decide what a query sees."""
        return bool(self.global_tokens or self.prefix or self.chunk)

    @property
    def masks_keys(self) -> bool:
        """Whether any key can be hidden from a query by the structure itself."""
        return self.is_causal or self.window is not None or self.chunk is not None

    def scale_for(self, head_dim: int) -> float:
        return self.scale if self.scale is not None else head_dim**-0.5

    def positions(
        self,
        q_len: int,
        kv_len: int,
        device: torch.device | str | None = None,
        overlays: Overlays | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Where queries (q_len, 1) and keys (1, kv_len) stand in their sequence, as ``causal`` aligns them."""
        for name, length in (("q_len", q_len), ("kv_len", kv_len)):
            if not isinstance(length, torch.SymInt):  # a length that an exported program leaves open
                check_int(name, length, least=0)
        shift: Tensor | int = kv_len - q_len
        if overlays is None or not overlays:
            q_pos, k_pos = masks.positions(q_len, kv_len, torch.device(device) if device is not None else None)
        else:
            q_pos, k_pos, shift = overlays.positions(q_len, kv_len)
        return (q_pos - shift if self.causal is Causal.TOP_LEFT else q_pos), k_pos

    def dense_mask(
        self,
        q_len: int,
        kv_len: int,
        device: torch.device | str | None = None,
        overlays: Overlays | None = None,
    ) -> Tensor:
        """The truth that every kernel is tested against: bool, True = may attend.

        (q_len, kv_len), or (batch or 1, heads or 1, q_len, kv_len) where ``overlays`` (packed segments, images, live
        blocks) decide too.
        """
        q_pos, k_pos = self.positions(q_len, kv_len, device, overlays)
        visible = masks.in_window(q_pos, k_pos, self.left, self.right)
        if self.chunk is not None:
            visible = visible & masks.same_chunk(q_pos, k_pos, self.chunk)
        if self.global_tokens:
            visible = visible | masks.global_token(q_pos, k_pos, self.global_tokens)
        if self.is_causal:
            visible = visible & masks.causal(q_pos, k_pos)
        if self.prefix:
            visible = visible | masks.in_prefix(k_pos, self.prefix)
        return overlays.join(visible, q_pos, self.block_size) if overlays else visible


def window_from_sliding_window(sliding_window: int | None) -> tuple[int, None] | None:
    """Hugging Face's ``sliding_window=W`` counts the query itself: W keys in all are ``(W - 1, None)``."""
    if sliding_window is None:
        return None
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window!r}; allowed: a positive int, or None for no window")
    return sliding_window - 1, None


def _checked_window(window: object) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}; allowed: None or a pair (left, right) of ints or None")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or not 0 <= side <= LARGEST_COUNT):
            raise ValueError(
                f"window is {window!r}; each side must be an int >= 0 (at most {LARGEST_COUNT}), or None for unbounded"
            )
    left, right = window
    return None if left is None and right is None else (left, right)


def _finite_float(value: object, argument: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{argument} is {value!r}; allowed: a finite number or None")
    return float(value)

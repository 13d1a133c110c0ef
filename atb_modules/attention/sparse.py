"""SparseConfig: which keys a layer's queries see, in the words that users type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from atb_modules.checks import check_int
from atb_modules.spec import AttentionSpec
from atb_modules.strategies import parse_enum


class SparseMode(StrEnum):
    """SLIDING_WINDOW: keys near the query. BLOCK_SPARSE: live blocks of a layout. PREFIX_LM: the prefix sees itself."""

    SLIDING_WINDOW = "sliding_window"
    BLOCK_SPARSE = "block_sparse"
    PREFIX_LM = "prefix_lm"


#: mode -> the options that it needs, and those that it may have besides
_OPTIONS: dict[SparseMode, tuple[tuple[str, ...], tuple[str, ...]]] = {
    SparseMode.SLIDING_WINDOW: (("window_size",), ("global_tokens",)),
    SparseMode.BLOCK_SPARSE: (("block_size", "block_layout"), ("window_size", "global_tokens")),
    SparseMode.PREFIX_LM: (("prefix_length",), ("window_size",)),
}


@dataclass(frozen=True)
class SparseConfig:
    """The sparsity of an attention layer; a dict with the same keys serves wherever one is taken.

    Args:
        mode: "sliding_window", "block_sparse" or "prefix_lm".
        window_size: keys on each side of the query, itself not counted; causal layers use the left side alone.
        global_tokens: the first tokens, that see all and are seen by all (in causal layers: by all later tokens).
        prefix_length: the first keys, seen by every query, those before them included.
        block_size: edge of the blocks of the layout.
        block_layout: rows of blocks, True (or 1) = live: (q_blocks, kv_blocks), or (heads, q_blocks, kv_blocks).
            Shorter sequences use its upper left part; longer ones are refused.

    Raises:
        ValueError, TypeError: for an option that the mode needs or does not know, or a value that is not allowed.
    """

    mode: SparseMode | str
    window_size: int | None = None
    global_tokens: int = 0
    prefix_length: int = 0
    block_size: int | None = None
    block_layout: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        mode = parse_enum(SparseMode, self.mode, "mode")
        object.__setattr__(self, "mode", mode)
        check_int("window_size", self.window_size, 0, optional=True)
        check_int("global_tokens", self.global_tokens, 0)
        check_int("prefix_length", self.prefix_length, 0)
        check_int("block_size", self.block_size, optional=True)
        if self.block_layout is not None:
            object.__setattr__(self, "block_layout", _checked_layout(self.block_layout))
        needed, allowed = _OPTIONS[mode]
        for field in dataclasses.fields(self)[1:]:
            given = getattr(self, field.name) != field.default
            if field.name in needed and getattr(self, field.name) is None:
                raise ValueError(f"{field.name} is None; mode {mode.value!r} needs it")
            if given and field.name not in needed and field.name not in allowed:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)!r}; mode {mode.value!r} allows "
                    f"{', '.join(needed + allowed)}"
                )

    @classmethod
    def parse(cls, value: SparseConfig | Mapping[str, Any] | None) -> SparseConfig | None:
        """The config itself, or the one that a dict of its options describes."""
        if value is None or isinstance(value, SparseConfig):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"sparse_config is {type(value).__name__}; allowed: a SparseConfig, a dict, None")
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in value if key not in names]
        if unknown or "mode" not in value:
            what = f"has {', '.join(map(repr, unknown))}" if unknown else "has no 'mode'"
            raise ValueError(f"sparse_config {what}; allowed: {', '.join(names)}, and mode is needed")
        return cls(**value)

    def apply(self, spec: AttentionSpec) -> AttentionSpec:
        """``spec`` with this sparsity."""
        if self.window_size is not None and spec.window is not None:
            raise ValueError(f"window is {spec.window} and window_size {self.window_size}; give one of them")
        window = spec.window if self.window_size is None else (self.window_size, self.window_size)
        return dataclasses.replace(
            spec,
            window=window,
            global_tokens=self.global_tokens,
            prefix=self.prefix_length,
            block_size=self.block_size,
        )


def _checked_layout(layout: Any) -> tuple[Any, ...]:
    """The layout as nested tuples of bools; rectangular, two or three levels deep."""
    rows = layout.tolist() if hasattr(layout, "tolist") else layout
    nested = _frozen(rows)
    shape = _shape(nested)
    if shape is None or len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            "block_layout is not a rectangle of 0/1 or bools; allowed: (q_blocks, kv_blocks) or "
            "(heads, q_blocks, kv_blocks)"
        )
    return nested


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"block_layout has {value!r}; allowed: True, False, 1, 0")


def _shape(nested: Any) -> tuple[int, ...] | None:
    """The sizes of nested tuples, None where they are ragged."""
    if not isinstance(nested, tuple):
        return ()
    inner = {_shape(item) for item in nested}
    if len(inner) > 1 or None in inner:
        return None
    return (len(nested), *(inner.pop() or () if inner else ()))


def layout_tensor(config: object, num_heads: int, device: torch.device | str | None) -> Tensor | None:
    """The block layout of a ``SparseConfig`` as bool (1, 1 or num_heads, q_blocks, kv_blocks), None without one."""
    if not isinstance(config, SparseConfig) or config.block_layout is None:
        return None
    layout = torch.tensor(config.block_layout, device=device)
    layout = layout[None, None] if layout.dim() == 2 else layout[None]
    if layout.shape[1] not in (1, num_heads):
        raise ValueError(f"block_layout has {layout.shape[1]} heads; allowed: 1 or num_heads {num_heads}")
    return layout


def layout_part(layout: Tensor | None, block_size: int | None, q_len: int, kv_len: int) -> Tensor | None:
    """The part of a layout that covers these lengths."""
    if layout is None or block_size is None:
        return None
    needed = -(-q_len // block_size), -(-kv_len // block_size)
    if needed[0] > layout.shape[2] or needed[1] > layout.shape[3]:
        raise ValueError(
            f"block_layout has {tuple(layout.shape[2:])} blocks of {block_size}; "
            f"{q_len} queries and {kv_len} keys need {needed}"
        )
    return layout[..., : needed[0], : needed[1]]

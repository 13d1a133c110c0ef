"""Who computes: the strategy enums, and the words that users type for them.

A strategy never changes the mathematics. Strings and members are interchangeable everywhere
(``"sdpa" == AttentionStrategy.SDPA``); ``AUTO`` asks the registry for the cheapest kernel that can serve the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from enum import StrEnum
from typing import TypeVar

E = TypeVar("E", bound=StrEnum)


class AttentionStrategy(StrEnum):
    """Who computes attention (dense and paged)."""

    AUTO = "auto"
    REFERENCE = "reference"  # einops, any floating dtype, the truth of the tests
    EAGER = "eager"  # plain PyTorch: matmul, softmax, matmul
    SDPA = "sdpa"  # torch.nn.functional.scaled_dot_product_attention
    BLOCKED = "blocked"  # plain PyTorch a block of queries, over the keys that the structure leaves
    FLEX = "flex"  # torch's FlexAttention, compiled for the call; never chosen by AUTO
    CPU = "cpu"  # our C++ kernels
    ASCEND = "ascend"  # torch_npu's fused operators
    ASCEND_C = "ascend_c"  # our Ascend C kernels


class NormStrategy(StrEnum):
    """Who computes RMSNorm and LayerNorm, alone, fused with the residual add, or modulated (AdaLN)."""

    AUTO = "auto"
    REFERENCE = "reference"
    TORCH = "torch"
    CPU = "cpu"
    ASCEND = "ascend"
    ASCEND_C = "ascend_c"


class MLPStrategy(StrEnum):
    """Who computes the activation of a feed-forward, a mixture of experts, and the chain of one with a norm."""

    AUTO = "auto"
    REFERENCE = "reference"
    TORCH = "torch"
    CPU = "cpu"
    ASCEND = "ascend"
    ASCEND_C = "ascend_c"


class LinearStrategy(StrEnum):
    """Who computes matrix products with a weight."""

    AUTO = "auto"
    REFERENCE = "reference"
    TORCH = "torch"
    CPU = "cpu"
    ASCEND = "ascend"
    ASCEND_C = "ascend_c"


class RotaryStrategy(StrEnum):
    """Who rotates queries and keys."""

    AUTO = "auto"
    REFERENCE = "reference"
    TORCH = "torch"
    CPU = "cpu"
    ASCEND = "ascend"


class CacheStrategy(StrEnum):
    """Who writes keys and values into the pages of the cache."""

    AUTO = "auto"
    REFERENCE = "reference"
    TORCH = "torch"
    CPU = "cpu"
    ASCEND = "ascend"
    ASCEND_C = "ascend_c"


class DecodeStrategy(StrEnum):
    """Who computes one token through a whole layer: one native call, or the modules one after the other."""

    AUTO = "auto"
    MODULES = "modules"
    CPU = "cpu"


class MultiModalStrategy(StrEnum):
    """In how many calls attention of two modalities is computed; see ``multimodal.attention``."""

    AUTO = "auto"
    REFERENCE = "reference"  # UNIFIED by the einops reference
    THREE_CALL = "three_call"  # each modality over itself, and across; joined by their log-sum-exps
    PREFIX = "prefix"  # one call a modality, over the keys of both side by side
    UNIFIED = "unified"  # one call under one mask, over everything side by side


class AttentionType(StrEnum):
    """The words of ``TransformerLayer(attention_type=...)``."""

    FLASH = "flash"  # any fused kernel: the registry chooses
    FLASH_SPARSE = "flash_sparse"  # the same for a layer with a SparseConfig
    SDPA = "sdpa"
    EAGER = "eager"
    REFERENCE = "reference"


#: The family of strategies that serves each op.
OP_FAMILIES: dict[str, type[StrEnum]] = {
    "attention": AttentionStrategy,
    "paged_attention": AttentionStrategy,
    "rms_norm": NormStrategy,
    "add_rms_norm": NormStrategy,
    "layer_norm": NormStrategy,
    "add_layer_norm": NormStrategy,
    "modulated_norm": NormStrategy,
    "gated_activation": MLPStrategy,
    "moe": MLPStrategy,
    "fused_mlp_residual_norm": MLPStrategy,
    "linear": LinearStrategy,
    "norm_linear": LinearStrategy,
    "weight_only_linear": LinearStrategy,
    "quantized_linear": LinearStrategy,
    "rotary": RotaryStrategy,
    "cache_append": CacheStrategy,
    "rotary_append": CacheStrategy,
    "decode_layer": DecodeStrategy,
    "multimodal_attention": MultiModalStrategy,
}

_FAMILY_WORDS: dict[str, type[StrEnum]] = {
    "attention": AttentionStrategy,
    "norm": NormStrategy,
    "mlp": MLPStrategy,
    "linear": LinearStrategy,
    "rotary": RotaryStrategy,
    "cache": CacheStrategy,
    "decode": DecodeStrategy,
    "multimodal": MultiModalStrategy,
}

_OVERRIDES: ContextVar[tuple[StrEnum, ...]] = ContextVar("atb_modules_strategy_overrides", default=())


def parse_enum(enum: type[E], value: str | E, argument: str) -> E:
    """The member of ``enum`` that ``value`` names; ValueError with the allowed words otherwise."""
    if isinstance(value, str):
        for member in enum:
            if member.value == value:
                return member
    allowed = ", ".join(repr(member.value) for member in enum)
    raise ValueError(f"{argument} is {value!r}; allowed: {allowed}")


def attention_strategy_of(attention_type: str | AttentionType) -> AttentionStrategy:
    """The strategy behind the word of ``attention_type``; both "flash" words leave the choice to the registry."""
    word = parse_enum(AttentionType, attention_type, "attention_type")
    if word in (AttentionType.FLASH, AttentionType.FLASH_SPARSE):
        return AttentionStrategy.AUTO
    return AttentionStrategy(word.value)


@contextlib.contextmanager
def use_strategy(**families: str) -> Iterator[None]:
    """Override strategies inside a ``with`` block, for this thread or task alone.

    >>> with use_strategy(attention="reference", norm="torch"):
    ...     layer(x)

    Keywords: attention, norm, mlp, linear, rotary, cache, decode, multimodal. An override wins over what a module
    was built with.
    """
    # A list, for no set or dict tells apart members of different families with the same word.
    members = list(_OVERRIDES.get())
    for word, value in families.items():
        if word not in _FAMILY_WORDS:
            raise TypeError(f"use_strategy got {word!r}; allowed keywords: {', '.join(_FAMILY_WORDS)}")
        family = _FAMILY_WORDS[word]
        chosen = parse_enum(family, value, word)
        members = [*(m for m in members if not isinstance(m, family)), chosen]
    token = _OVERRIDES.set(tuple(members))
    try:
        yield
    finally:
        _OVERRIDES.reset(token)


def effective_strategy(op: str, strategy: str | StrEnum) -> StrEnum:
    """The strategy in force for ``op``: the local override, else what the caller asked for."""
    family = OP_FAMILIES[op]
    for member in _OVERRIDES.get():
        if isinstance(member, family):
            return member
    return strategy if isinstance(strategy, family) else parse_enum(family, strategy, "strategy")

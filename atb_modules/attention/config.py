"""Options of an attention module, grouped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from atb_modules.attention.sparse import SparseConfig
from atb_modules.checks import check_bool, check_int, check_probability, check_type
from atb_modules.norm import NormConfig, NormType
from atb_modules.spec import AttentionSpec, Causal
from atb_modules.strategies import CacheStrategy, LinearStrategy, parse_enum


class QKNormOrder(StrEnum):
    """Whether queries and keys are normalised before or after they are rotated."""

    BEFORE_ROTARY = "before_rotary"  # Qwen3, Gemma 3
    AFTER_ROTARY = "after_rotary"  # Llama 4, Hunyuan


@dataclass(frozen=True)
class AttentionConfig:
    """Options of attention beyond sizes and types.

    Args:
        causal: whether a query sees no later key; None leaves it to the layer (decoder yes, encoder no).
        window: inclusive ``(left, right)``, see ``AttentionSpec``.
        sparse: a ``SparseConfig`` or a dict of its options.
        scale: what scores are multiplied with; None is ``1 / sqrt(head_dim)``.
        softcap: ``cap * tanh(score / cap)``.
        sinks: whether each head has a trained sink logit (GPT-OSS).
        alibi: whether scores get ALiBi's distance bias.
        qkv_bias, out_bias: biases of the projections.
        qk_norm: None, or a ``QKNormOrder``: RMSNorm or LayerNorm of each head's queries and keys.
        qk_norm_type: "rmsnorm" or "layernorm".
        qk_norm_config: options of that norm.
        dropout: probability of dropping an attention weight in training.
        linear_strategy, cache_strategy: who computes projections and cache writes.
    """

    causal: bool | None = None
    window: tuple[int | None, int | None] | None = None
    sparse: SparseConfig | Mapping[str, Any] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNormOrder | str | None = None
    qk_norm_type: str = "rmsnorm"
    qk_norm_config: NormConfig = field(default_factory=NormConfig)
    dropout: float = 0.0
    linear_strategy: str = "auto"
    cache_strategy: str = "auto"

    def __post_init__(self) -> None:
        if self.qk_norm is not None:
            object.__setattr__(self, "qk_norm", parse_enum(QKNormOrder, self.qk_norm, "qk_norm"))
        check_bool("causal", self.causal, optional=True)
        for name in ("sinks", "alibi", "qkv_bias", "out_bias"):
            check_bool(name, getattr(self, name))
        object.__setattr__(self, "qk_norm_type", parse_enum(NormType, self.qk_norm_type, "qk_norm_type"))
        check_type("qk_norm_config", self.qk_norm_config, NormConfig)
        check_probability("dropout", self.dropout)
        for name, family in (("linear_strategy", LinearStrategy), ("cache_strategy", CacheStrategy)):
            object.__setattr__(self, name, parse_enum(family, getattr(self, name), name))
        object.__setattr__(self, "sparse", SparseConfig.parse(self.sparse))
        spec = AttentionSpec(window=self.window, scale=self.scale, softcap=self.softcap)
        object.__setattr__(self, "window", spec.window)
        self.spec(causal=False)

    def spec(self, causal: bool) -> AttentionSpec:
        """The spec of these options; ``causal`` serves where the options leave it open."""
        chosen = causal if self.causal is None else self.causal
        spec = AttentionSpec(
            causal=Causal.BOTTOM_RIGHT if chosen else Causal.NONE,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
        )
        return self.sparse.apply(spec) if isinstance(self.sparse, SparseConfig) else spec


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slopes: ``2^(-8 i / n)`` for n a power of two, else those of the next lower power filled up with every
    second slope of the next higher one (Press et al., 2022)."""
    check_int("num_heads", num_heads)
    power = 1
    while power * 2 <= num_heads:
        power *= 2
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return tuple(slopes + extra)


def checked_head_dim(hidden_size: int, num_heads: int, head_dim: int | None, num_kv_heads: int) -> int:
    """head_dim, or its default; TypeError or ValueError where the sizes are none or do not fit each other."""
    for name, value in (
        ("hidden_size", hidden_size),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
    ):
        check_int(name, value)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads}; allowed: a divisor of num_heads {num_heads}")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must divide hidden_size {hidden_size}, or give head_dim")
        return hidden_size // num_heads
    check_int("head_dim", head_dim)
    return head_dim

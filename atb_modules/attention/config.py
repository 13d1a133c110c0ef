"""Options of an attention module, grouped."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from atb_modules.norm import NormConfig
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
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout!r}; allowed: 0 <= dropout < 1")
        for name, family in (("linear_strategy", LinearStrategy), ("cache_strategy", CacheStrategy)):
            object.__setattr__(self, name, parse_enum(family, getattr(self, name), name))
        self.spec(causal=False)

    def spec(self, causal: bool) -> AttentionSpec:
        """The spec of these options; ``causal`` serves where the options leave it open."""
        chosen = causal if self.causal is None else self.causal
        return AttentionSpec(
            causal=Causal.BOTTOM_RIGHT if chosen else Causal.NONE,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
        )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slopes: ``2^(-8 i / n)`` for n a power of two, else those of the next lower power filled up with every
    second slope of the next higher one (Press et al., 2022)."""
    power = 1
    while power * 2 <= num_heads:
        power *= 2
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return tuple(slopes + extra)


def checked_head_dim(hidden_size: int, num_heads: int, head_dim: int | None, num_kv_heads: int) -> int:
    """head_dim, or its default; ValueError where the sizes do not fit each other."""
    for name, value in (
        ("hidden_size", hidden_size),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; allowed: a positive int")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads}; allowed: a divisor of num_heads {num_heads}")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must divide hidden_size {hidden_size}, or give head_dim")
        return hidden_size // num_heads
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1:
        raise ValueError(f"head_dim is {head_dim!r}; allowed: a positive int")
    return head_dim

"""LatentAttention: DeepSeek's multi-head latent attention, whose cache holds one compressed vector a token.

DeepSeek-AI, 2024 (DeepSeek-V2, section 2.1; V3 is the same). With c the compressed vector of a token and r its rotated
key, shared by all heads::

    q = [q_nope, rotate(q_rope)]        from x, or through a compressed q of its own
    c, r = norm(c'), rotate(r')         [c', r'] = kv_a_proj_with_mqa(x): what the cache keeps
    expanded   k_h = [W_uk_h c, r], v_h = W_uv_h c, attention a head: training, and the first tokens of a cache
    absorbed   q'_h = [W_uk_h^T q_nope_h, q_rope_h] over one kv head k = [c, r], v = c, then W_uv_h: decoding

Letters in shapes: B rows of the batch, L tokens a row, T packed tokens, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.cached_call import attend_cached
from atb_modules.attention.checking import (
    check_call,
    check_positions,
    check_rotary_tables,
)
from atb_modules.attention.functional import attention, cache_append, paged_attention
from atb_modules.attention.masking import expand_mask
from atb_modules.attention.rope import RotaryConfig, RotaryEmbedding, RotaryLayout, rotary
from atb_modules.attention.rope_scaling import RotaryScaling, temperature
from atb_modules.checks import check_bool, check_int, check_number, check_probability, check_type
from atb_modules.kernels.half_units import cpu_has_half_units
from atb_modules.linear import Linear
from atb_modules.norm import NormCastOrder, RMSNorm
from atb_modules.spec import AttentionSpec, Causal
from atb_modules.strategies import CacheStrategy, LinearStrategy, attention_strategy_of, parse_enum

RotaryTables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LatentConfig:
    """Options of latent attention beyond sizes.

    Args:
        causal: whether a query sees no later key.
        bias: biases of the projections from and to the stream (``attention_bias``); the others have none.
        norm_eps: of the norms of the compressed vectors.
        scale: what scores are multiplied with; None is ``1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)``, times the
            square of YaRN's temperature where the rotary scaling has ``mscale_all_dim``.
        dropout: probability of dropping an attention weight in training.
        linear_strategy, cache_strategy: who computes projections and cache writes.
    """

    causal: bool = True
    bias: bool = False
    norm_eps: float = 1e-6
    scale: float | None = None
    dropout: float = 0.0
    linear_strategy: str = "auto"
    cache_strategy: str = "auto"

    def __post_init__(self) -> None:
        check_bool("causal", self.causal)
        check_bool("bias", self.bias)
        check_number("norm_eps", self.norm_eps, "a finite number >= 0", lambda eps: eps >= 0)
        check_number("scale", self.scale, optional=True)
        check_probability("dropout", self.dropout)
        for name, family in (("linear_strategy", LinearStrategy), ("cache_strategy", CacheStrategy)):
            object.__setattr__(self, name, parse_enum(family, getattr(self, name), name))


class LatentAttention(nn.Module):
    """Multi-head latent attention; a drop-in for ``Attention`` in a layer. Names of weights are DeepSeek's.

    Args:
        hidden_size: channels of the input and the output.
        num_heads: heads.
        kv_lora_rank: channels of the compressed keys and values.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head's queries and keys without and with positions.
        v_head_dim: channels of a head's values.
        q_lora_rank: channels of the compressed queries, None where they are not compressed.
        rotary: a ``RotaryConfig``; default base 10,000 in the INTERLEAVED layout, as DeepSeek's weights are stored.
        attention_type: "flash" (the registry chooses), "sdpa", "eager" or "reference".
        config: a ``LatentConfig``.
        layer_idx: this layer's number in a cache.

    A cache for it is ``KVCacheManager(..., num_heads, kv_lora_rank + qk_rope_head_dim, num_kv_heads=1)``. Keys and
    values are the same numbers: the key pages alone are written and read. On an NPU, decode steps in half precision
    over pages of 128 tokens are one fused operator where kv_lora_rank is 512, qk_rope_head_dim 64, and num_heads a
    power of two up to 128.
    """

    #: What a cache must have.
    num_kv_heads = 1

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        rotary: RotaryConfig | None = None,
        attention_type: str = "flash",
        config: LatentConfig | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "kv_lora_rank": kv_lora_rank}
        sizes |= {"qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim, "v_head_dim": v_head_dim}
        for name, size in sizes.items():
            check_int(name, size)
        check_int("q_lora_rank", q_lora_rank, optional=True)
        check_int("layer_idx", layer_idx, least=0, optional=True)
        check_type("rotary", rotary, RotaryConfig, optional=True)
        check_type("config", config, LatentConfig, optional=True)
        self.config = config = config if config is not None else LatentConfig()
        self.hidden_size, self.num_heads, self.layer_idx = hidden_size, num_heads, layer_idx
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.head_dim = kv_lora_rank + qk_rope_head_dim
        rotary = rotary if rotary is not None else RotaryConfig(layout=RotaryLayout.INTERLEAVED)
        self.rotary = RotaryEmbedding(qk_rope_head_dim, rotary)
        self.strategy = attention_strategy_of(attention_type)
        qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        scale = _scale(qk_head_dim, rotary.scaling) if config.scale is None else config.scale
        self.spec = AttentionSpec(causal=Causal.BOTTOM_RIGHT if config.causal else Causal.NONE, scale=scale)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"strategy": config.linear_strategy, **where}
        norm: dict[str, Any] = {"cast_order": NormCastOrder.WEIGHT_LAST, **where}
        if q_lora_rank is None:
            self.q_proj = Linear(hidden_size, num_heads * qk_head_dim, False, **options)
        else:
            self.q_a_proj = Linear(hidden_size, q_lora_rank, config.bias, **options)
            self.q_a_layernorm = RMSNorm(q_lora_rank, config.norm_eps, **norm)
            self.q_b_proj = Linear(q_lora_rank, num_heads * qk_head_dim, False, **options)
        self.q_lora_rank = q_lora_rank
        self.kv_a_proj_with_mqa = Linear(hidden_size, self.head_dim, config.bias, **options)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, config.norm_eps, **norm)
        self.kv_b_proj = Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), False, **options)
        self.o_proj = Linear(num_heads * v_head_dim, hidden_size, config.bias, **options)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        kv_cache: KVCacheManager | None = None,
        cache_step: CacheStep | None = None,
        rotary_tables: RotaryTables | None = None,
        cache_layer: int | None = None,
    ) -> Tensor:
        """Attend; arguments as ``Attention.forward``, of which this is the self attention.

        Without a cache the keys and values of each head are expanded. With one, compressed vectors are appended and
        the heads' matrices absorbed into queries and results; only the first tokens of empty rows are expanded.
        """
        if kv_cache is not None:
            with torch.no_grad():
                return attend_cached(
                    self, hidden_states, attention_mask, position_ids, kv_cache, cache_step, rotary_tables, cache_layer
                )
        if cache_step is not None:
            raise ValueError("cache_step is given without kv_cache")
        check_call(hidden_states, (3,))
        batch, length = hidden_states.shape[:2]
        if rotary_tables is not None:
            check_rotary_tables(rotary_tables)
        else:
            if position_ids is None:
                position_ids = torch.arange(length, device=hidden_states.device)
            else:
                check_positions(position_ids, (batch, length))
            rotary_tables = self.rotary(position_ids, length if self.rotary.depends_on_length else None)
        mask = expand_mask(attention_mask, batch, length)
        q, k, v = (t.transpose(1, 2) for t in self._expand(*self._project(hidden_states, rotary_tables)))
        dropout = self.config.dropout if self.training else 0.0
        out, _ = attention(q, k, v, self.spec, mask=mask, dropout_p=dropout, strategy=self.strategy)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _project(self, x: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_nope, rotated q_rope (..., H, channels), compressed c (..., kv_lora_rank), rotated r (..., 1, rope)."""
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        c, r = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        config = self.rotary.config
        options: dict[str, Any] = {"layout": config.layout, "strategy": config.strategy}
        q_rope, r = rotary(q_rope, *tables, **options), rotary(r.unsqueeze(-2), *tables, **options)
        return q_nope, q_rope, self.kv_a_layernorm(c), r

    def _expand(self, q_nope: Tensor, q_rope: Tensor, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head (..., H, channels)."""
        heads = self.kv_b_proj(c).unflatten(-1, (self.num_heads, -1))
        k_nope, v = heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = torch.cat([k_nope, r.expand(*k_nope.shape[:-1], -1)], dim=-1)
        return torch.cat([q_nope, q_rope], dim=-1), k, v

    def _attend_step(
        self,
        x: Tensor,
        position_ids: Tensor | None,
        kv_cache: KVCacheManager,
        step: CacheStep,
        layer_idx: int,
        tables: RotaryTables | None,
    ) -> Tensor:
        if step.image_ids is not None:
            raise ValueError("cache_step has image_ids; latent attention allows text alone")
        if tables is None:
            positions = step.positions if position_ids is None else position_ids
            tables = self.rotary(positions, step.max_kv_length)
        q_nope, q_rope, c, r = self._project(x, tables)
        latent = torch.cat([c.unsqueeze(-2), r], dim=-1)
        pages, _ = kv_cache.pages(layer_idx)
        slots, strategy = step.slots(layer_idx), self.config.cache_strategy
        cache_append(latent, latent, pages, pages, slots, strategy=strategy, trusted=True)
        if step.max_query_length > 1 and not any(step.past_lengths):
            begins = step.cu_seqlens_q
            segments: dict[str, Any] = {"cu_seqlens_q": begins, "cu_seqlens_k": begins, "strategy": self.strategy}
            out, _ = attention(*self._expand(q_nope, q_rope, c, r), self.spec, **segments)
            return self.o_proj(out.flatten(-2))
        self._check_absorbable()
        wide = _product_dtype(x)
        weight = self.kv_b_proj.weight.to(wide).unflatten(0, (self.num_heads, -1))
        up_keys, up_values = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        q_latent = torch.einsum("thn,hnc->thc", q_nope.to(wide), up_keys).to(x.dtype)
        absorbed = torch.cat([q_latent, q_rope], dim=-1)
        out, _ = paged_attention(
            absorbed,
            pages,
            pages,
            step.block_table(layer_idx),
            step.kv_lengths,
            step.cu_seqlens_q,
            self.spec,
            value_dim=self.kv_lora_rank,
            strategy=self.strategy,
            trusted=True,
        )
        heads = torch.einsum("thc,hvc->thv", out.to(wide), up_values)
        return self.o_proj(heads.flatten(-2).to(x.dtype))

    def _check_absorbable(self) -> None:
        """Only the weight of ``kv_b_proj`` can be absorbed: an adapter around it, or hooks, would be left out."""
        up = self.kv_b_proj
        if not isinstance(up, Linear) or up._forward_hooks or up._forward_pre_hooks:
            what = "hooks" if isinstance(up, Linear) else f"the class {type(up).__name__}"
            raise ValueError(
                f"kv_b_proj has {what}, and decoding over a cache absorbs its weight alone; allowed: a plain Linear, "
                "with adapters merged into it"
            )

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, kv_lora_rank={self.kv_lora_rank}, q_lora_rank={self.q_lora_rank}, "
            f"head_dims={self.qk_nope_head_dim}+{self.qk_rope_head_dim}/{self.v_head_dim}"
        )


def _product_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or float32 on a CPU that has no units for its half precision: many times as fast there."""
    half = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and not cpu_has_half_units(x.dtype) else x.dtype


def _scale(qk_head_dim: int, scaling: RotaryScaling | None) -> float:
    """``1 / sqrt(qk_head_dim)``, times YaRN's temperature squared where it is on all channels."""
    factor = temperature(scaling.factor, scaling.mscale_all_dim) if scaling and scaling.mscale_all_dim else 1.0
    return qk_head_dim**-0.5 * factor * factor

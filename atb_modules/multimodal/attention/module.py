"""MultiModalAttention: project vision and text, rotate each by its own positions, attend, project back.

Letters in shapes: B rows of the batch, V vision and T text tokens a row, N packed tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.config import AttentionConfig, QKNormOrder, checked_head_dim
from atb_modules.attention.qkv import FusedQKV
from atb_modules.attention.rope import RotaryConfig, RotaryEmbedding, rotary
from atb_modules.checks import check_int, check_type
from atb_modules.linear import Linear, may_overwrite
from atb_modules.multimodal.attention.cached import attend_cached
from atb_modules.multimodal.attention.config import (
    MultiModalConfig,
    TextStart,
    check_attention_options,
    parts_of,
)
from atb_modules.multimodal.attention.functional import multimodal_attention
from atb_modules.multimodal.attention.spec import CrossAttentionMode, MultiModalLayout, MultiModalSpec
from atb_modules.multimodal.attention.strategies import QKV, sample_of
from atb_modules.multimodal.attention.tokens import Lengths, RotaryTables, Tokens, gather_tokens
from atb_modules.norm import build_norm
from atb_modules.strategies import MultiModalStrategy, attention_strategy_of, parse_enum


class ModalityProjections(nn.Module):
    """What stands around the attention of one modality: qkv and output projections, norms of queries and keys."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, config: AttentionConfig, **where: Any
    ) -> None:
        super().__init__()
        self.order = config.qk_norm
        options: dict[str, Any] = {"strategy": config.linear_strategy, **where}
        self.qkv = FusedQKV(hidden_size, num_heads, num_kv_heads, head_dim, bias=config.qkv_bias, **options)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, config.out_bias, **options)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm is not None:
            self.q_norm = build_norm(config.qk_norm_type, head_dim, config.qk_norm_config, **where)
            self.k_norm = build_norm(config.qk_norm_type, head_dim, config.qk_norm_config, **where)

    def forward(
        self, states: Tensor, rotation: RotaryConfig | None, tables: RotaryTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(..., hidden) -> q (..., num_heads, head_dim), k and v (..., num_kv_heads, head_dim)."""
        q, k, v = self.qkv(states)
        if self.order is QKNormOrder.BEFORE_ROTARY:
            q, k = self._normalise(q, k)
        if rotation is not None and tables is not None:
            options: dict[str, Any] = {"layout": rotation.layout, "strategy": rotation.strategy}
            options["overwrite"] = may_overwrite(self, self.qkv.qkv_proj)
            q, k = rotary(q, *tables, **options), rotary(k, *tables, **options)
        if self.order is QKNormOrder.AFTER_ROTARY:
            q, k = self._normalise(q, k)
        return q, k, v

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)


class MultiModalAttention(nn.Module):
    """Attention over vision and text tokens that stay apart: vision sees its image, text sees text, across by mode.

    Args:
        vision_seq_len, text_seq_len: the most tokens of each that a row brings in one call.
        num_heads: query heads.
        head_dim: channels a head.
        hidden_size: channels of the input and the output; default num_heads * head_dim.
        num_kv_heads: key and value heads; default num_heads.
        cross_attention_mode: a ``CrossAttentionMode`` or its word, "text_see_vision", "vision_see_text", "both" or
            "none".
        strategy: a ``MultiModalStrategy`` or its word: "three_call", "prefix", "unified", or "auto", which takes the
            fastest by predicted cost. It never changes the result.
        attention_type: "flash", "sdpa", "eager" or "reference": who computes the calls inside.
        multimodal: a ``MultiModalConfig``: what the modalities share, and their rotary positions.
        config: an ``AttentionConfig``; ``causal`` is that of text over text (default True). Windows, sparse layouts,
            sinks and ALiBi are refused.
        layer_idx: this layer's number in a cache.
        device, dtype: of the parameters.

    The parameters are ``projections.shared``, or ``projections.vision`` and ``projections.text``; in each
    ``qkv.qkv_proj`` (a state dict with q_proj, k_proj, v_proj loads too) and ``o_proj``.

    Raises:
        ValueError, TypeError: for sizes, words or options that are not allowed, naming the argument.
    """

    def __init__(
        self,
        vision_seq_len: int,
        text_seq_len: int,
        num_heads: int,
        head_dim: int,
        hidden_size: int | None = None,
        *,
        num_kv_heads: int | None = None,
        cross_attention_mode: CrossAttentionMode | str = CrossAttentionMode.TEXT_SEE_VISION,
        strategy: MultiModalStrategy | str = MultiModalStrategy.AUTO,
        attention_type: str = "flash",
        multimodal: MultiModalConfig | None = None,
        config: AttentionConfig | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("vision_seq_len", vision_seq_len), ("text_seq_len", text_seq_len)):
            check_int(name, value, least=0)
        check_int("num_heads", num_heads)
        check_int("head_dim", head_dim)
        check_int("layer_idx", layer_idx, least=0, optional=True)
        check_type("multimodal", multimodal, MultiModalConfig, optional=True)
        check_type("config", config, AttentionConfig, optional=True)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_size = num_heads * head_dim if hidden_size is None else hidden_size
        checked_head_dim(hidden_size, num_heads, head_dim, num_kv_heads)
        config = config if config is not None else AttentionConfig()
        check_attention_options(config)
        self.vision_seq_len, self.text_seq_len, self.hidden_size = vision_seq_len, text_seq_len, hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.multimodal = multimodal if multimodal is not None else MultiModalConfig()
        self.config, self.layer_idx = config, layer_idx
        causal = config.causal is not False
        self.spec = MultiModalSpec(cross_attention_mode, causal, scale=config.scale, softcap=config.softcap)
        self.strategy = parse_enum(MultiModalStrategy, strategy, "strategy")
        self.attention_strategy = attention_strategy_of(attention_type)
        sizes = hidden_size, num_heads, num_kv_heads, head_dim, config
        names = parts_of(self.multimodal.projections)
        self.projections = nn.ModuleDict(
            {name: ModalityProjections(*sizes, device=device, dtype=dtype) for name in names}
        )
        rotations = self.multimodal.vision_rotary, self.multimodal.text_rotary
        self.vision_rotary, self.text_rotary = (
            None if rotation is None else RotaryEmbedding(head_dim, rotation) for rotation in rotations
        )

    def forward(
        self,
        vision: Tensor | None,
        text: Tensor | None,
        *,
        vision_lengths: Lengths | None = None,
        text_lengths: Lengths | None = None,
        image_lengths: Sequence[Sequence[int]] | None = None,
        vision_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        layout: MultiModalLayout | None = None,
        vision_positions: Tensor | None = None,
        text_positions: Tensor | None = None,
        vision_tables: RotaryTables | None = None,
        text_tables: RotaryTables | None = None,
        kv_cache: KVCacheManager | None = None,
        cache_step: CacheStep | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            vision, text: (B, V, hidden_size) and (B, T, hidden_size), or packed (N, hidden_size) each with ``layout``.
                None is a modality without tokens.
            vision_lengths, text_lengths: real tokens of each row, from its first on.
            image_lengths: for each row the tokens of its images, which see themselves alone; text sees them all. They
                add up to the row's real vision tokens. A row without an image has an empty list.
            vision_mask, text_mask: (B, V) and (B, T) of bool or 0/1, 1 = real, in place of lengths.
            layout: samples and images of packed tokens.
            vision_positions, text_positions: integers, (B, V) or (V,), (B, T) or (T,), or packed (N,). The default
                counts vision from 0, and text from where ``text_start`` says.
            vision_tables, text_tables: cos and sin, one row of rotary_dim / 2 a token, where they were computed
                elsewhere (two-dimensional or M-RoPE positions); they need the modality's rotary config.
            kv_cache: append keys and values to this cache and let text attend to all of it; see
                ``multimodal.attention.cached``. Such a call is not differentiable.
            cache_step: the step all layers share, of each row's vision and text tokens; None opens the layer's own.

        Returns:
            vision and text, updated, in the shapes they came in; padded positions are 0.
        """
        found = gather_tokens(
            vision,
            text,
            layout,
            vision_mask,
            text_mask,
            vision_lengths,
            text_lengths,
            image_lengths,
            self.hidden_size,
            (self.vision_seq_len, self.text_seq_len),
            pack=kv_cache is not None,
        )
        vision_tokens, text_tokens, layout = found
        own = vision_tokens.positions(vision_positions), text_tokens.positions(text_positions)
        tables = vision_tokens.tables(vision_tables), text_tokens.tables(text_tables)
        if kv_cache is not None:
            assert layout is not None
            with torch.no_grad():
                return attend_cached(self, vision_tokens, text_tokens, layout, own, tables, kv_cache, cache_step)
        if cache_step is not None:
            raise ValueError("cache_step is given without kv_cache")
        own = self._positions(vision_tokens, text_tokens, layout, own)
        sides = self.project(vision_tokens, own[0], tables[0]), self.project(text_tokens, own[1], tables[1])
        if layout is None:
            sides = heads_first(sides[0]), heads_first(sides[1])
        out = multimodal_attention(
            *sides,
            self.spec,
            layout=layout,
            dropout_p=self.config.dropout if self.training else 0.0,
            strategy=self.strategy,
            attention_strategy=self.attention_strategy,
        )
        if layout is None:
            out = out[0].transpose(1, 2), out[1].transpose(1, 2)
        return self.project_back(vision_tokens, out[0]), self.project_back(text_tokens, out[1])

    def project(
        self, tokens: Tokens, positions: Tensor | None, tables: RotaryTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one modality, rotated: (..., tokens, heads, head_dim)."""
        embedding = self.vision_rotary if tokens.name == "vision" else self.text_rotary
        if embedding is None and tables is not None:
            raise ValueError(f"{tokens.name}_tables is given; this attention has no {tokens.name}_rotary")
        if embedding is not None and tables is None:
            assert positions is not None
            tables = embedding(positions)
        elif embedding is not None and tables is not None and 2 * tables[0].shape[-1] > self.head_dim:
            raise ValueError(
                f"{tokens.name}_tables has {tables[0].shape[-1]} angles; head_dim {self.head_dim} allows "
                f"{self.head_dim // 2}"
            )
        return self.projections_of(tokens.name)(tokens.states, None if embedding is None else embedding.config, tables)

    def _positions(
        self,
        vision: Tokens,
        text: Tokens,
        layout: MultiModalLayout | None,
        own: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor | None, Tensor | None]:
        """The caller's positions or, where something is rotated, the default ones; without a cache."""
        device = text.states.device
        vision_len, text_len = vision.states.shape[-2], text.states.shape[-2]
        vision_own, text_own = own
        if vision_own is None and self.vision_rotary is not None:
            vision_own = torch.arange(vision_len, device=device)
            if layout is not None:
                vision_own = vision_own - layout.cu_vision[sample_of(layout.cu_vision, vision_len)]
        if text_own is None and self.text_rotary is not None:
            after = self.multimodal.text_start is TextStart.AFTER_VISION
            text_own = torch.arange(text_len, device=device)
            if layout is not None:
                sample = sample_of(layout.cu_text, text_len)
                text_own = text_own - layout.cu_text[sample]
                text_own = text_own + layout.cu_vision.diff()[sample] if after else text_own
            elif after:
                text_own = text_own + vision_len
        return vision_own, text_own

    def projections_of(self, name: str) -> ModalityProjections:
        """The projections of "vision" or "text"."""
        part = self.projections[name if name in self.projections else "shared"]
        assert isinstance(part, ModalityProjections)
        return part

    def project_back(self, tokens: Tokens, out: Tensor) -> Tensor:
        """(..., tokens, heads, head_dim) to the shape that the caller gave."""
        return tokens.unpack(self.projections_of(tokens.name).o_proj(out.flatten(-2)))

    def extra_repr(self) -> str:
        return (
            f"vision_seq_len={self.vision_seq_len}, text_seq_len={self.text_seq_len}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, cross={self.spec.cross}, "
            f"strategy={self.strategy.value}"
        )


def heads_first(qkv: QKV) -> QKV:
    """(batch, tokens, heads, head_dim) as (batch, heads, tokens, head_dim)."""
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv)
    return q, k, v

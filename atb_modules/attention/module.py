"""Attention: project, normalise and rotate queries and keys, append to the cache, attend, project back.

Letters in shapes: B rows of the batch, L tokens a row, T packed tokens of all rows, S tokens of the other sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.cached_call import attend_cached
from atb_modules.attention.checking import (
    check_call,
    check_key_values,
    check_options,
    check_positions,
    check_rotary_tables,
)
from atb_modules.attention.config import AttentionConfig, QKNormOrder, alibi_slopes, checked_head_dim
from atb_modules.attention.functional import attention, cache_append, paged_attention, rotary_append
from atb_modules.attention.image_step import attend_images, rows_without_images
from atb_modules.attention.masking import expand_mask
from atb_modules.attention.qkv import FusedQKV, QKVLayout, SeparateQKV, check_output, out_features, projected_qkv
from atb_modules.attention.rope import RotaryConfig, RotaryEmbedding, RotaryLayout, rotary
from atb_modules.attention.sparse import layout_part, layout_tensor
from atb_modules.checks import check_int, check_tensor, check_type
from atb_modules.fusions import DEFAULT_FUSIONS, Fusion
from atb_modules.linear import Linear, may_overwrite
from atb_modules.norm import build_norm
from atb_modules.overlays import Overlays
from atb_modules.strategies import AttentionType, attention_strategy_of

RotaryTables = tuple[Tensor, Tensor]
_NO_OVERLAYS = Overlays()


class Attention(nn.Module):
    """Multi-head, grouped or multi-query attention over itself (``cross=False``) or another sequence.

    Args:
        hidden_size: channels of the input and the output.
        num_heads: query heads.
        head_dim: channels a head; default hidden_size / num_heads.
        num_kv_heads: key and value heads; default num_heads.
        attention_type: "flash" or "flash_sparse" (the registry chooses), "sdpa", "eager" or "reference".
        cross: attend to another sequence, given as ``key_value_states`` at each call.
        kv_hidden_size: channels of that sequence; default hidden_size.
        rotary: a ``RotaryConfig`` for rotary positions, None for none.
        config: an ``AttentionConfig``.
        layer_idx: this layer's number in a cache.

    Self attention stores ``qkv.qkv_proj`` (a state dict with q_proj, k_proj, v_proj loads too), cross attention
    ``qkv.q_proj``, ``qkv.k_proj`` and ``qkv.v_proj``. Weights start as in ``Linear``, sinks at 0.
    """

    block_layout: Tensor | None

    fusions: frozenset[Fusion] = DEFAULT_FUSIONS  # what runs as one kernel, see TransformerLayer.use_fusions

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        attention_type: str = "flash",
        cross: bool = False,
        kv_hidden_size: int | None = None,
        rotary: RotaryConfig | None = None,
        config: AttentionConfig | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = checked_head_dim(hidden_size, num_heads, head_dim, num_kv_heads)
        check_options(cross, rotary, config, layer_idx)
        config = config if config is not None else AttentionConfig()
        check_int("kv_hidden_size", kv_hidden_size, optional=True)
        if kv_hidden_size is not None and not cross:
            raise ValueError(f"kv_hidden_size is {kv_hidden_size}; self attention (cross=False) allows None")
        options: dict[str, Any] = {"strategy": config.linear_strategy, "device": device, "dtype": dtype}
        if cross:
            width = hidden_size if kv_hidden_size is None else kv_hidden_size
            q_proj = Linear(hidden_size, num_heads * head_dim, config.qkv_bias, **options)
            k_proj = Linear(width, num_kv_heads * head_dim, config.qkv_bias, **options)
            v_proj = Linear(width, num_kv_heads * head_dim, config.qkv_bias, **options)
            qkv: nn.Module = SeparateQKV(q_proj, k_proj, v_proj, num_heads, num_kv_heads)
        else:
            qkv = FusedQKV(hidden_size, num_heads, num_kv_heads, head_dim, bias=config.qkv_bias, **options)
        o_proj = Linear(num_heads * head_dim, hidden_size, config.out_bias, **options)
        self._assemble(
            qkv, o_proj, hidden_size, num_heads, num_kv_heads, head_dim, attention_type, cross, rotary, config
        )
        self.layer_idx = layer_idx
        self._build_extras(device, dtype)

    def _assemble(
        self, qkv, o_proj, hidden_size, num_heads, num_kv_heads, head_dim, attention_type, cross, rotary, config
    ) -> None:
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.cross, self.config = head_dim, cross, config
        self.strategy = attention_strategy_of(attention_type)
        if attention_type == AttentionType.FLASH_SPARSE and config.sparse is None:
            raise ValueError("attention_type is 'flash_sparse' and sparse_config is None; allowed: both, or 'flash'")
        self.spec = config.spec(causal=not cross)
        self.qkv, self.o_proj = qkv, o_proj
        self.rotary = None if rotary is None else RotaryEmbedding(head_dim, rotary)
        self.alibi_slopes = alibi_slopes(num_heads) if config.alibi else None

    def _build_extras(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if self.config.qk_norm is not None:
            kind, options = self.config.qk_norm_type, self.config.qk_norm_config
            self.q_norm = build_norm(kind, self.head_dim, options, device, dtype)
            self.k_norm = build_norm(kind, self.head_dim, options, device, dtype)
        self.sinks = None
        if self.config.sinks:
            self.sinks = nn.Parameter(torch.zeros(self.num_heads, device=device, dtype=dtype))
        layout = layout_tensor(self.config.sparse, self.num_heads, device)
        self.register_buffer("block_layout", layout, persistent=False)

    @classmethod
    def from_projections(
        cls,
        q_proj: nn.Module | None = None,
        k_proj: nn.Module | None = None,
        v_proj: nn.Module | None = None,
        o_proj: nn.Module | None = None,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        qkv_proj: nn.Module | None = None,
        qkv_layout: QKVLayout | str = QKVLayout.QKV,
        attention_type: str = "flash",
        cross: bool = False,
        rotary: RotaryConfig | None = None,
        config: AttentionConfig | None = None,
        layer_idx: int | None = None,
    ) -> Attention:
        """Attention over a user's own projections, whose modules and parameters are taken as they are.

        Give q_proj, k_proj and v_proj, or one fused qkv_proj with its ``qkv_layout``; o_proj None leaves the heads
        merged. Biases, hooks and wrappers (LoRA) of the modules stay in force. Sizes are read from
        ``out_features`` (or the weight).
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_options(cross, rotary, config, layer_idx)
        separate = (q_proj, k_proj, v_proj)
        qkv, head_dim = projected_qkv(separate, qkv_proj, qkv_layout, num_heads, num_kv_heads, cross)
        if o_proj is not None:
            check_output(o_proj, num_heads * head_dim)
        if cross and qkv_proj is not None:
            raise ValueError("cross is True; cross attention needs q_proj, k_proj and v_proj, not qkv_proj")
        merged = o_proj is None or isinstance(o_proj, nn.Identity)
        hidden_size = num_heads * head_dim if merged else out_features(o_proj)
        config = config if config is not None else AttentionConfig()
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        o_proj = nn.Identity() if o_proj is None else o_proj
        self._assemble(
            qkv, o_proj, hidden_size, num_heads, num_kv_heads, head_dim, attention_type, cross, rotary, config
        )
        self.layer_idx = layer_idx
        parameter = next((p for p in qkv.parameters() if p.is_floating_point()), None)
        where = (None, None) if parameter is None else (parameter.device, parameter.dtype)
        self._build_extras(*where)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        key_value_states: Tensor | tuple[Tensor, Tensor] | None = None,
        kv_cache: KVCacheManager | None = None,
        cache_step: CacheStep | None = None,
        rotary_tables: RotaryTables | None = None,
        cache_layer: int | None = None,
        overlays: Overlays | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden_states: (B, L, hidden_size), or packed (T, hidden_size) together with ``cache_step``.
            attention_mask: (B, S) padding mask of bool or 0/1, 1 = real; or bool / additive, broadcasting to
                (B, num_heads, L, S). With a cache, (B, L) alone: which of the new tokens are real.
            position_ids: integers (B, L), (L,) or packed (T,); default counts up from 0, or from the cache's length.
            key_value_states: for cross attention, (B, S, kv_hidden_size), or the pair that ``project_keys_values``
                returned for it.
            kv_cache: append to this cache and attend to all of it; its open sequences are the rows (opened where
                none are). Such a call is not differentiable.
            cache_step: the step all layers share; None lets this layer open its own.
            rotary_tables: cos and sin, where the model computed them once for all layers.
            cache_layer: the layer of kv_cache that this one is; default ``layer_idx``, taken in order where not given.
            overlays: packed segments (B is 1 then) and images, for calls without a cache; see ``Overlays``.

        Returns:
            The shape of hidden_states; padded positions of a cached call are 0.
        """
        check_type("overlays", overlays, Overlays, optional=True)
        if self.cross:
            if key_value_states is None:
                raise ValueError("key_value_states is None; cross attention needs the other sequence")
            if kv_cache is not None:
                raise ValueError("kv_cache is given; cross attention keeps no cache, pass project_keys_values' pair")
            return self._attend_across(hidden_states, attention_mask, key_value_states, overlays)
        if key_value_states is not None:
            raise ValueError("key_value_states is given; self attention (cross=False) allows None")
        if kv_cache is not None:
            if overlays is not None:
                raise ValueError("overlays is given with kv_cache; allowed: one of them, a cache has rows of its own")
            with torch.no_grad():
                return attend_cached(
                    self, hidden_states, attention_mask, position_ids, kv_cache, cache_step, rotary_tables, cache_layer
                )
        if cache_step is not None:
            raise ValueError("cache_step is given without kv_cache")
        return self._attend(hidden_states, attention_mask, position_ids, rotary_tables, overlays)

    def project_keys_values(self, key_value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the other sequence, to be computed once and passed to many calls: (B, S, kv_heads, D)."""
        if not self.cross:
            raise ValueError("cross is False; only cross attention projects another sequence")
        check_tensor("key_value_states", key_value_states, "a tensor (batch, seq, kv_hidden_size)")
        k, v = self.qkv.keys_values(key_value_states)
        return (k if self.k_norm is None else self.k_norm(k)), v

    def _attend(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        rotary_tables: RotaryTables | None,
        overlays: Overlays | None,
    ) -> Tensor:
        check_call(hidden_states, (3,))
        length = hidden_states.shape[1]
        if rotary_tables is not None:
            check_rotary_tables(rotary_tables)
        elif position_ids is not None:
            check_positions(position_ids, tuple(hidden_states.shape[:2]))
        q, k, v = self.qkv(hidden_states)
        if self.rotary is not None and rotary_tables is None:
            if position_ids is None:
                position_ids = torch.arange(length, device=hidden_states.device)
            rotary_tables = self.rotary(position_ids, length if self.rotary.depends_on_length else None)
        q, k = self._position(q, k, rotary_tables)
        mask = expand_mask(attention_mask, hidden_states.shape[0], length)
        return self._merge(q, k, v, mask, overlays)

    def _attend_across(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | tuple[Tensor, Tensor],
        overlays: Overlays | None,
    ) -> Tensor:
        check_call(hidden_states, (3,))
        check_key_values(key_value_states, hidden_states, self.num_kv_heads, self.head_dim)
        q = self.qkv.queries(hidden_states)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if isinstance(key_value_states, Tensor):
            key_value_states = self.project_keys_values(key_value_states)
        k, v = key_value_states
        mask = expand_mask(attention_mask, hidden_states.shape[0], k.shape[1])
        return self._merge(q, k, v, mask, overlays)

    def _attend_step(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None,
        kv_cache: KVCacheManager,
        step: CacheStep,
        layer_idx: int,
        rotary_tables: RotaryTables | None,
    ) -> Tensor:
        q, k, v = self.qkv(hidden_states)
        k_pages, v_pages = kv_cache.pages(layer_idx)
        slots = step.slots(layer_idx)
        config = self.config
        rotate_late = config.qk_norm is QKNormOrder.AFTER_ROTARY
        if config.qk_norm is QKNormOrder.BEFORE_ROTARY:
            q, k = self._normalise(q, k)
        if self.rotary is not None and not self._owns_qkv():
            q = q.clone()  # it is rotated in place below, and a hook or a user's projection may hold this memory
        if self.rotary is None:
            if rotate_late:
                q, k = self._normalise(q, k)
            cache_append(k, v, k_pages, v_pages, slots, strategy=config.cache_strategy, trusted=True)
        else:
            if rotary_tables is None:
                positions = step.positions if position_ids is None else position_ids
                rotary_tables = self.rotary(positions, step.max_kv_length)
            cos, sin = rotary_tables
            if rotate_late or Fusion.ROTARY_APPEND not in self.fusions:
                q, k = self._rotate(q, k, rotary_tables)
                q, k = self._normalise(q, k) if rotate_late else (q, k)
                cache_append(k, v, k_pages, v_pages, slots, strategy=config.cache_strategy, trusted=True)
            else:
                interleaved = self.rotary.config.layout is RotaryLayout.INTERLEAVED
                rotary_append(
                    q,
                    k,
                    v,
                    cos,
                    sin,
                    k_pages,
                    v_pages,
                    slots,
                    interleaved=interleaved,
                    strategy=config.cache_strategy,
                    trusted=True,
                )
        shared: dict[str, Any] = {
            "sinks": self.sinks,
            "alibi_slopes": self._slopes(q.device),
            "strategy": self.strategy,
        }
        out = None
        if step.image_ids is None or rows_without_images(step):
            out, _ = paged_attention(
                q,
                k_pages,
                v_pages,
                step.block_table(layer_idx),
                step.kv_lengths,
                step.cu_seqlens_q,
                self.spec,
                trusted=True,
                **shared,
            )
        if step.image_ids is not None:
            out = attend_images(q, kv_cache, layer_idx, step, out, self.spec, **shared)
        assert out is not None
        return self.o_proj(out.flatten(-2))

    def _position(self, q: Tensor, k: Tensor, tables: RotaryTables | None) -> tuple[Tensor, Tensor]:
        """Norm and rotation of q and k (..., tokens, heads, head_dim), in the configured order."""
        order = self.config.qk_norm
        if order is QKNormOrder.BEFORE_ROTARY:
            q, k = self._normalise(q, k)
        if self.rotary is not None and tables is not None:
            q, k = self._rotate(q, k, tables)
        if order is QKNormOrder.AFTER_ROTARY:
            q, k = self._normalise(q, k)
        return q, k

    def _rotate(self, q: Tensor, k: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
        assert self.rotary is not None
        options: dict[str, Any] = {"layout": self.rotary.config.layout, "strategy": self.rotary.config.strategy}
        options["overwrite"] = self._owns_qkv()
        return rotary(q, *tables, **options), rotary(k, *tables, **options)

    def _owns_qkv(self) -> bool:
        """Whether nobody else can hold the memory of q and k."""
        return isinstance(self.qkv, FusedQKV) and may_overwrite(self, self.qkv.qkv_proj)

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def _merge(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, overlays: Overlays | None) -> Tensor:
        packed = overlays if overlays is not None else _NO_OVERLAYS
        layout = layout_part(self.block_layout, self.spec.block_size, q.shape[1], k.shape[1])
        out, _ = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            self.spec,
            mask=mask,
            sinks=self.sinks,
            alibi_slopes=self._slopes(q.device),
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_k=packed.cu_seqlens_k,
            image_ids=packed.image_ids,
            block_mask=packed.block_mask if layout is None else layout,
            dropout_p=self.config.dropout if self.training else 0.0,
            strategy=self.strategy,
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _slopes(self, device: torch.device) -> Tensor | None:
        return None if self.alibi_slopes is None else torch.tensor(self.alibi_slopes, device=device)

    def extra_repr(self) -> str:
        kind = "cross, " if self.cross else ""
        return (
            f"{kind}num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"strategy={self.strategy.value}, causal={self.spec.causal.value}, window={self.spec.window}"
        )

"""A call of an attention module over a paged cache, up to its step: shared by ``Attention`` and ``LatentAttention``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.cache.refusal import check_batch, undone_if_refused
from atb_modules.attention.checking import check_cached_call, check_packed, check_prefix, packed_positions
from atb_modules.attention.masking import pack_padded, unpack_padded


def attend_cached(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    kv_cache: KVCacheManager,
    step: CacheStep | None,
    rotary_tables: tuple[Tensor, Tensor] | None,
    layer_idx: int | None,
) -> Tensor:
    """Checks, packs padded rows, opens a step where none is given, and unpacks what ``module._attend_step`` returns."""
    check_cached_call(hidden_states, kv_cache, step, module.num_kv_heads, module.head_dim, module.spec)
    if layer_idx is None:
        layer_idx = module.layer_idx = kv_cache.register_layer() if module.layer_idx is None else module.layer_idx
    padded, real = hidden_states.dim() == 3, None
    if padded:
        hidden_states, lengths, real = pack_padded(hidden_states, attention_mask)
    if position_ids is not None and rotary_tables is None:
        position_ids = packed_positions(position_ids, hidden_states, real)
    check_packed(hidden_states, step, rotary_tables)
    with undone_if_refused(kv_cache, layer_idx if step is None else None):
        if step is None:
            check_batch(kv_cache, len(lengths))
            step = kv_cache.layer_step(layer_idx, lengths)
        check_prefix(module.spec, step)
        out = module._attend_step(hidden_states, position_ids, kv_cache, step, layer_idx, rotary_tables)
    return out if real is None else unpack_padded(out, real)

"""Attention of a step over a paged cache whose new tokens hold images that see both ways (Gemma 3).

The kernels over pages know causality and windows alone. So the rows with an image are read out of the pages and served
by the dense ones, which know images; it happens while a prompt is read, once an image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.functional import attention
from atb_modules.spec import AttentionSpec


def attend_images(
    q: Tensor,
    kv_cache: KVCacheManager,
    layer_idx: int,
    step: CacheStep,
    out: Tensor | None,
    spec: AttentionSpec,
    *,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    strategy: str,
) -> Tensor:
    """Results (total, num_heads, head_dim) of rotated queries (total, num_heads, head_dim).

    Args:
        out: what the pages gave for all rows; None where every row has an image. Its rows with an image are replaced.
    """
    image_ids = step.image_ids
    assert image_ids is not None
    parts, begin = [], 0
    for row, count in enumerate(step.query_lengths):
        new, ids = slice(begin, begin + count), image_ids[begin : begin + count]
        begin += count
        if out is not None and not bool((ids >= 0).any()):
            parts.append(out[new])
            continue
        keys, values = kv_cache.gather(layer_idx, row)
        known = torch.full((keys.shape[1] - count,), -1, dtype=ids.dtype, device=ids.device)
        attended, _ = attention(
            q[new].transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0).to(q.dtype),
            values.unsqueeze(0).to(q.dtype),
            spec,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            image_ids=torch.cat([known, ids]).unsqueeze(0),
            strategy=strategy,
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def rows_without_images(step: CacheStep) -> bool:
    """Whether some row of a step with images has none."""
    assert step.image_ids is not None
    return any(not bool((ids >= 0).any()) for ids in step.image_ids.split(list(step.query_lengths)) if ids.numel())

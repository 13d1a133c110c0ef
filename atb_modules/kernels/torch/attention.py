"""Dense attention in plain PyTorch: EAGER (matmul, softmax, matmul) and SDPA (torch's fused kernels)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atb_modules import masks
from atb_modules.kernels.costs import Cost, uneven
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import AttentionTraits
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec, Causal
from atb_modules.strategies import AttentionStrategy

NEGATIVE_INFINITY = float("-inf")


def attention_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    overlays: Overlays | None = None,
    dropout_p: float = 0.0,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scores in float32, softmax, product with v. Grouped heads share k and v without a copy; (out, lse or None)."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(compute).reshape(batch, kv_heads, heads // kv_heads, q_len, head_dim)
    scores = torch.matmul(grouped * spec.scale_for(head_dim), k.to(compute).unsqueeze(2).transpose(-1, -2))
    scores = scores.reshape(batch, heads, q_len, kv_len)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    bias, visible = bias_and_visible(spec, q, kv_len, mask, alibi_slopes, overlays)
    if bias is not None:
        scores = scores + bias.to(compute)
    if visible is not None:
        scores = scores.masked_fill(~visible, NEGATIVE_INFINITY)
    joined = scores
    if sinks is not None:
        sink = sinks.to(compute).reshape(1, heads, 1, 1).expand(batch, heads, q_len, 1)
        joined = torch.cat([scores, sink], dim=-1)
    empty = None
    if visible is not None or (mask is not None and mask.dtype != torch.bool):
        empty = (joined == NEGATIVE_INFINITY).all(dim=-1, keepdim=True)
        joined = joined.masked_fill(empty, 0.0)
    probabilities = torch.softmax(joined, dim=-1)[..., :kv_len]
    if empty is not None:
        probabilities = probabilities.masked_fill(empty, 0.0)
    if dropout_p > 0.0:
        probabilities = F.dropout(probabilities, dropout_p)
    grouped_probabilities = probabilities.reshape(batch, kv_heads, heads // kv_heads, q_len, kv_len)
    out = torch.matmul(grouped_probabilities, v.to(compute).unsqueeze(2))
    out = out.reshape(batch, heads, q_len, v.shape[-1]).to(q.dtype)
    if not need_lse:
        return out, None
    lse = torch.logsumexp(joined, dim=-1)
    if empty is not None:
        lse = lse.masked_fill(empty.squeeze(-1), NEGATIVE_INFINITY)
    return out, lse


def attention_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    overlays: Overlays | None = None,
    dropout_p: float = 0.0,
    need_lse: bool = False,
) -> tuple[Tensor, None]:
    """``torch.nn.functional.scaled_dot_product_attention``; a dense mask only where its causal flag does not fit."""
    q_len, kv_len = q.shape[2], k.shape[2]
    causal_flag = q_len == kv_len or spec.causal is Causal.TOP_LEFT
    bare = mask is None and alibi_slopes is None and spec.window is None and not spec.has_overlays and not overlays
    if bare and (not spec.is_causal or causal_flag):
        attn_mask, is_causal = None, spec.is_causal
    else:
        bias, visible = bias_and_visible(spec, q, kv_len, mask, alibi_slopes, overlays)
        is_causal = False
        if bias is None:
            attn_mask = visible
        else:
            attn_mask = bias if visible is None else bias.masked_fill(~visible, NEGATIVE_INFINITY)
            # float32 is taken as it is: rounding a bias to a half dtype would cost more than the softmax does
            if attn_mask.dtype != torch.float32:
                attn_mask = attn_mask.to(q.dtype)
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=spec.scale_for(q.shape[-1]),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out, None


def bias_and_visible(
    spec: AttentionSpec,
    q: Tensor,
    kv_len: int,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    overlays: Overlays | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The additive part (float mask, ALiBi) and the boolean part (structure, bool mask) of what hides keys.

    Either is None where it would change nothing; both broadcast to (batch, heads, q_len, kv_len).
    """
    q_len, device = q.shape[2], q.device
    bias = mask if mask is not None and mask.dtype != torch.bool else None
    visible = mask if mask is not None and mask.dtype == torch.bool else None
    if alibi_slopes is not None:
        compute = torch.promote_types(q.dtype, torch.float32)
        q_pos, k_pos = spec.positions(q_len, kv_len, device, overlays)
        alibi = masks.alibi_bias(alibi_slopes.to(compute), q_pos, k_pos)
        bias = alibi if bias is None else bias + alibi
    newest = q_len == 1 and spec.causal is not Causal.TOP_LEFT and spec.window is None and spec.chunk is None
    if overlays or (spec.masks_keys and not newest):
        structure = spec.dense_mask(q_len, kv_len, device, overlays)
        visible = structure if visible is None else visible & structure
    return bias, visible


def _eager_reasons(spec: AttentionSpec, traits: AttentionTraits) -> tuple[str, ...]:
    return ()


def sdpa_reasons(spec: AttentionSpec, traits: AttentionTraits) -> tuple[str, ...]:
    reasons = []
    if traits.need_lse:
        reasons.append("scaled_dot_product_attention does not return the LSE")
    if spec.softcap is not None:
        reasons.append("scaled_dot_product_attention has no softcap")
    if traits.has_sinks:
        reasons.append("scaled_dot_product_attention has no sinks")
    if traits.dropout and traits.device_type == "cpu" and traits.dtype != torch.float32:
        reasons.append("on the CPU, dropout takes the unfused path, which rounds scores to the input dtype")
    return tuple(reasons)


def _builds_structure(spec: AttentionSpec, traits: AttentionTraits) -> bool:
    """Whether a (q_len, kv_len) mask is made of the call's structure."""
    newest = traits.q_len == 1 and spec.causal is not Causal.TOP_LEFT
    return spec.window is not None or spec.has_overlays or traits.has_overlays or (spec.is_causal and not newest)


def _eager_cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    hides = _builds_structure(spec, traits)
    masked = hides or traits.mask != "none"
    overlaid = spec.has_overlays or traits.has_overlays
    return Cost(
        operations=2.0 * traits.pairs * (traits.head_dim + traits.value_dim),
        bytes=traits.bytes,
        calls=1.0 + hides + overlaid + 3.0 * (traits.segments > 0),
        scores=traits.pairs * (2.0 if masked else 1.0),
        cells=1.0 * traits.q_len * traits.kv_len if hides else 0.0,
        steps=1.0 * traits.batch * traits.num_kv_heads,
    )


def _sdpa_cost(spec: AttentionSpec, traits: AttentionTraits) -> Cost:
    flagged = spec.is_causal and traits.q_len == traits.kv_len and spec.window is None
    overlaid = spec.has_overlays or traits.has_overlays
    bare = traits.mask == "none" and not traits.has_alibi and not overlaid
    hides = not (flagged and bare) and _builds_structure(spec, traits)
    masked = hides or not bare
    # blocks of queries as PyTorch's kernel for the CPU cuts them; under its causal flag it skips keys
    block = 256 if traits.q_len >= 768 else 64 if traits.q_len >= 192 else 32
    blocks = -(-traits.q_len // block)
    items = traits.batch * traits.num_heads * blocks
    share = uneven(items) * ((0.33 + 0.33 * (1.0 + 1.0 / blocks)) if flagged and bare and blocks else 1.0)
    cells = 1.0 * traits.q_len * traits.kv_len
    built = (6.0 if overlaid else 2.0) * cells if hides else 0.0
    # dropout takes the unfused road
    scores = share * traits.pairs * (8.0 if traits.dropout and traits.device_type == "cpu" else 1.0)
    return Cost(
        operations=2.0 * share * traits.pairs * (traits.head_dim + traits.value_dim),
        bytes=traits.bytes,
        calls=1.0 + 3.0 * hides + masked + 4.0 * overlaid + 8.0 * (traits.segments > 0),
        scores=scores,
        cells=built + (max(1.0 * traits.mask_elements, cells) if masked else 0.0),
        steps=share * items * -(-traits.kv_len // 512),
    )


register(Kernel("attention", AttentionStrategy.SDPA, attention_sdpa, sdpa_reasons, _sdpa_cost, transformable=False))
register(Kernel("attention", AttentionStrategy.EAGER, attention_eager, _eager_reasons, _eager_cost))

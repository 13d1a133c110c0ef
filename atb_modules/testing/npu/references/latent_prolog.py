"""npu_mla_prolog_v2 and v3: from tokens to the queries and the cached latent of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.pages import require_unique_slots
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rotary import turn
from atb_modules.testing.npu.references.rules import require_dtype, require_not_310p

_QUERY_RANK, _LATENT, _NOPE, _ROPE = 1536, 512, 128, 64


@reference("npu::npu_mla_prolog_v2")
def mla_prolog_v2(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Docs: "kv_cache and kr_cache are updated in place, though the interface is not an in-place one; v3 is
    recommended". Returns (query, query_rope, kv_cache, kr_cache, scale); see v3 for what is computed.
    """
    query, query_rope = _prolog(
        token_x, (weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr), (rmsnorm_gamma_cq, rmsnorm_epsilon_cq),
        (rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv), (rope_sin, rope_cos), cache_index, (kv_cache, kr_cache), cache_mode,
        (7168,),
    )  # fmt: skip
    return query, query_rope, kv_cache, kr_cache, torch.zeros(1)


@reference("npu::npu_mla_prolog_v3")
def mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    cache_index: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Docs: "x times W_DQ, RMSNorm, then two ways: times W_UQ and W_UK gives query, times W_QR and rotated gives
    query_rope; x times W_DKV, RMSNorm, goes to kv_cache; x times W_KR, rotated, to kr_cache". Sizes: hidden 7168 (v3
    also 7680 and 6144), query rank 1536, latent 512, D 128, rope 64, heads a power of two to 128, block size 16 or
    128, S to 16, bfloat16. Note the order of arguments: rope_sin stands before rope_cos. Rotation is by neighbours
    (interleaved), as the latent attention of DeepSeek has it; the docs do not say.
    """
    require(cache_index is not None, "cache_index is needed in the paged modes")
    assert cache_index is not None
    query, query_rope = _prolog(
        token_x, (weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr), (rmsnorm_gamma_cq, rmsnorm_epsilon_cq),
        (rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv), (rope_sin, rope_cos), cache_index, (kv_cache, kr_cache), cache_mode,
        (7168, 7680, 6144),
    )  # fmt: skip
    return query, query_rope, torch.zeros(1), token_x.new_zeros(1), torch.zeros(1)


def _prolog(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    query_norm: tuple[Tensor, float],
    latent_norm: tuple[Tensor, float],
    angles: tuple[Tensor, Tensor],
    slots: Tensor,
    caches: tuple[Tensor, Tensor],
    cache_mode: str,
    hidden: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Norms are (gamma, epsilon), angles (sin, cos), caches those of the latent and of the rotated keys."""
    down_q, up_q, up_k, down_kv = weights
    (sin, cos), (kv_cache, kr_cache) = angles, caches
    require_not_310p()
    for name, tensor in (("token_x", x), ("weight_dq", down_q), ("kv_cache", kv_cache), ("rope_sin", sin)):
        require_dtype(name, tensor, (torch.bfloat16,))
    require(cache_mode == "PA_BSND", f"cache_mode is {cache_mode!r}; only 'PA_BSND' is emulated")
    require(x.dim() in (2, 3), f"token_x has {x.dim()} dims; (T, He) or (B, S, He)")
    require(x.dim() == 2 or x.shape[1] <= 16, f"S is {x.shape[1]}; at most 16")
    require(x.shape[-1] in hidden, f"He is {x.shape[-1]}; supported: {', '.join(map(str, hidden))}")
    heads = up_k.shape[0]
    require(heads <= 128 and heads & (heads - 1) == 0, f"N is {heads}; 1, 2, 4, ... 128")
    _require_shape("weight_dq", down_q, (x.shape[-1], _QUERY_RANK))
    _require_shape("weight_uq_qr", up_q, (_QUERY_RANK, heads * (_NOPE + _ROPE)))
    _require_shape("weight_uk", up_k, (heads, _NOPE, _LATENT))
    _require_shape("weight_dkv_kr", down_kv, (x.shape[-1], _LATENT + _ROPE))
    _require_shape("rope_sin", sin, (*x.shape[:-1], _ROPE))
    _require_shape("rope_cos", cos, (*x.shape[:-1], _ROPE))
    require(slots.dtype == torch.int64, f"cache_index is {slots.dtype}; int64")
    _require_shape("cache_index", slots, tuple(x.shape[:-1]))
    require(kv_cache.shape[1] in (16, 128), f"BlockSize is {kv_cache.shape[1]}; 16 or 128")
    require(tuple(kv_cache.shape[2:]) == (1, _LATENT), "kv_cache must be (blocks, block_size, 1, 512)")
    require(tuple(kr_cache.shape) == (*kv_cache.shape[:3], _ROPE), "kr_cache must be (blocks, block_size, 1, 64)")
    wide = x.float()
    lowered = _norm(wide @ down_q.float(), *query_norm)
    queries = (lowered @ up_q.float()).unflatten(-1, (heads, _NOPE + _ROPE))
    nope, rope = queries.split((_NOPE, _ROPE), -1)
    query = torch.einsum("...nd,ndc->...nc", nope, up_k.float())
    query_rope = _rotate(rope, cos.float()[..., None, :], sin.float()[..., None, :])
    latent, key_rope = (wide @ down_kv.float()).split((_LATENT, _ROPE), -1)
    kept = require_unique_slots(slots.flatten(), kv_cache.shape[0] * kv_cache.shape[1], False)
    where = slots.flatten()[kept]
    kv_cache.view(-1, _LATENT)[where] = _norm(latent, *latent_norm).to(kv_cache.dtype).reshape(-1, _LATENT)
    rotated = _rotate(key_rope, cos.float(), sin.float())
    kr_cache.view(-1, _ROPE)[where] = rotated.to(kr_cache.dtype).reshape(-1, _ROPE)
    return query.to(x.dtype), query_rope.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turn(x, "interleave") * sin


def _norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float()


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    require(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}; {shape}")

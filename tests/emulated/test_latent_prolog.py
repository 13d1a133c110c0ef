"""The first half of latent attention in one call, against its formula in float64. The sizes are those of one model."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import OperatorError

from .helpers import DEVICE, assert_near

ops = torch.ops.npu
HEADS, TOKENS = 2, 3


def norm(x, gamma, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma


def rotate(x, cos, sin):
    turned = torch.complex(x[..., ::2], x[..., 1::2]) * torch.complex(cos, sin)
    return torch.stack((turned.real, turned.imag), -1).flatten(-2)


@pytest.fixture(scope="module")
def weights():
    generator = fresh_generator()
    shapes = {"dq": (7168, 1536), "uq_qr": (1536, HEADS * 192), "uk": (HEADS, 128, 512), "dkv_kr": (7168, 576)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (w / w.shape[-2] ** 0.5).bfloat16() for name, w in drawn.items()}


def arguments(weights, generator):
    x = torch.randn(TOKENS, 7168, generator=generator).bfloat16()
    gammas = [torch.rand(n, generator=generator).add(0.5).bfloat16() for n in (1536, 512)]
    angles = torch.rand(TOKENS, 32, generator=generator) * 6.28
    tables = [t.bfloat16().repeat_interleave(2, -1) for t in (angles.sin(), angles.cos())]
    slots = torch.tensor([5, 17, 30])
    caches = [torch.zeros(2, 16, 1, n, dtype=torch.bfloat16) for n in (512, 64)]
    return x, gammas, tables, slots, caches


@pytest.mark.parametrize("version", [2, 3])
def test_prolog(npu, weights, version):
    generator = fresh_generator()
    x, gammas, (sin, cos), slots, caches = arguments(weights, generator)
    given = [t.to(DEVICE) for t in (x, *weights.values(), *gammas, sin, cos)]
    kv_cache, kr_cache = (c.to(DEVICE) for c in caches)
    if version == 2:
        query, query_rope, *_ = ops.npu_mla_prolog_v2(*given, slots.to(DEVICE), kv_cache, kr_cache)
    else:
        query, query_rope, *_ = ops.npu_mla_prolog_v3(*given, kv_cache, kr_cache, cache_index=slots.to(DEVICE))
    w = {name: t.double() for name, t in weights.items()}
    c, s = cos.double()[:, ::2], sin.double()[:, ::2]
    queries = (norm(x.double() @ w["dq"], gammas[0].double(), 1e-5) @ w["uq_qr"]).view(TOKENS, HEADS, 192)
    assert_near(query, torch.einsum("tnd,ndc->tnc", queries[..., :128], w["uk"]))
    assert_near(query_rope, rotate(queries[..., 128:], c[:, None], s[:, None]))
    lowered = x.double() @ w["dkv_kr"]
    assert_near(kv_cache.cpu().view(32, 512)[slots], norm(lowered[:, :512], gammas[1].double(), 1e-5))
    assert_near(kr_cache.cpu().view(32, 64)[slots], rotate(lowered[:, 512:], c, s))
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[slots] = False
    assert (kv_cache.cpu().view(32, 512)[untouched] == 0).all()


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"token_x": (TOKENS, 4096)}, "He is 4096"),
        ({"weight_dq": (7168, 1024)}, "weight_dq has shape"),
        ({"kv_cache": (2, 32, 1, 512), "kr_cache": (2, 32, 1, 64)}, "BlockSize is 32"),
        ({"rope_sin": (TOKENS, 32)}, "rope_sin has shape"),
        ({"cache_mode": "PA_NZ"}, "cache_mode is 'PA_NZ'"),
        ({"slots": [5, 5, 6]}, "must be unique"),
    ],
)
def test_forbidden_calls(npu, weights, change, rule):
    x, gammas, (sin, cos), slots, caches = arguments(weights, fresh_generator())
    names = ["token_x", "weight_dq", "uq", "uk", "dkv", "gamma_q", "gamma_kv", "rope_sin", "rope_cos"]
    names += ["kv_cache", "kr_cache"]
    named = dict(zip(names, (x, *weights.values(), *gammas, sin, cos, *caches), strict=True))
    for name, shape in change.items():
        if name in named:
            named[name] = torch.zeros(shape, dtype=torch.bfloat16)
    slots = torch.tensor(change.get("slots", slots.tolist()))
    with pytest.raises(OperatorError, match=rule):
        ops.npu_mla_prolog_v3(
            *(t.to(DEVICE) for t in named.values()), cache_index=slots.to(DEVICE),
            cache_mode=change.get("cache_mode", "PA_BSND"),
        )  # fmt: skip

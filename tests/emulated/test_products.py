"""Quantised and weight-only products, dynamic quantisation, experts, prefetch and merges."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import EmulatedNPU, NoReferenceError, OperatorError

from .helpers import DEVICE, assert_near, draw
from .test_fusion_attention import truth

HALVES = [torch.float16, torch.bfloat16]
ops = torch.ops.npu
NUMBER = {torch.int8: 1, torch.float16: 5, torch.bfloat16: 15, torch.int32: 3}


def codes(generator, *shape):
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pertoken", [False, True])
@pytest.mark.parametrize("bias", [None, torch.int32, torch.float32])
def test_quant_matmul(npu, out, pertoken, bias):
    generator = fresh_generator()
    x, w = codes(generator, 5, 64), codes(generator, 64, 24)
    scale = torch.rand(24, generator=generator) * 1e-4
    rows = torch.rand(5, generator=generator) + 0.5 if pertoken else None
    shift = None if bias is None else torch.randint(-9, 9, (24,), generator=generator).to(bias)
    call = lambda: ops.npu_quant_matmul(  # noqa: E731
        x.to(DEVICE), w.to(DEVICE), scale.to(DEVICE), output_dtype=NUMBER[out],
        pertoken_scale=None if rows is None else rows.to(DEVICE), bias=None if shift is None else shift.to(DEVICE),
    )  # fmt: skip
    if bias == torch.float32 and out == torch.float16 and not pertoken:
        with pytest.raises(OperatorError, match="bias is torch.float32"):
            call()
        return
    want = x.double() @ w.double()
    want = (want + shift.double() if bias == torch.int32 else want) * scale.double()
    want = want if rows is None else want * rows.double()[:, None]
    assert_near(call(), want + shift.double() if bias == torch.float32 else want)


@pytest.mark.parametrize("offset", [False, True])
def test_the_offset_shifts_the_output(npu, offset):
    generator = fresh_generator()
    x, w = codes(generator, 4, 32), codes(generator, 32, 8)
    scale, shift = torch.full((1,), 2e-4), torch.full((8,), 3.0)
    y = ops.npu_quant_matmul(x.to(DEVICE), w.to(DEVICE), scale.to(DEVICE), offset=shift.to(DEVICE) if offset else None)
    want = (x.double() @ w.double()) * 2e-4 + (3.0 if offset else 0.0)
    assert y.dtype == torch.int8
    assert (y.cpu().double() - want.round().clamp(-128, 127)).abs().max() <= 1


def test_a_scale_made_for_the_cube_core(npu):
    generator = fresh_generator()
    x, w = codes(generator, 4, 32), codes(generator, 32, 8)
    scale = torch.rand(8, generator=generator) * 1e-3
    made = ops.npu_trans_quant_param(scale.to(DEVICE))
    assert made.dtype == torch.int64
    y = ops.npu_quant_matmul(x.to(DEVICE), w.to(DEVICE), made, output_dtype=NUMBER[torch.float16])
    assert_near(y, x.double() @ w.double() * scale.double(), scale=2.0)  # ten bits of mantissa are left


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quant_is_undone_by_its_scale(npu, dtype, smooth):
    generator = fresh_generator()
    x = draw(generator, 3, 4, 40, dtype=dtype)
    factors = (torch.rand(40, generator=generator) + 0.5).to(dtype) if smooth else None
    y, scale = ops.npu_dynamic_quant(x.to(DEVICE), smooth_scales=None if factors is None else factors.to(DEVICE))
    wide = x.double() if factors is None else x.double() * factors.double()
    assert y.dtype == torch.int8 and scale.shape == (3, 4)
    error = (y.cpu().double() * scale.cpu().double()[..., None] - wide).abs()
    assert (error <= 0.501 * scale.cpu().double()[..., None]).all()
    assert (y.cpu().abs().amax(-1) == 127).all()


def test_dynamic_quant_of_zeros(npu):
    y, scale = ops.npu_dynamic_quant(torch.zeros(2, 8, dtype=torch.half, device=DEVICE))
    assert (y.cpu() == 0).all() and (scale.cpu() == 0).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scales", ["tensor", "channel", "group"])
@pytest.mark.parametrize("offset", [False, True])
def test_weight_only_product(npu, dtype, scales, offset):
    generator = fresh_generator()
    x, w = draw(generator, 5, 96, dtype=dtype), codes(generator, 96, 16)
    shape = {"tensor": (1,), "channel": (1, 16), "group": (3, 16)}[scales]
    scale = (torch.rand(shape, generator=generator) * 0.01).to(dtype)
    shift = torch.randint(-20, 20, shape, generator=generator).to(dtype) if offset else None
    y = ops.npu_weight_quant_batchmatmul(
        x.to(DEVICE), w.to(DEVICE), scale.to(DEVICE), None if shift is None else shift.to(DEVICE),
        antiquant_group_size=32 if scales == "group" else 0,
    )  # fmt: skip
    wide = w.double()
    grow = (lambda t: t.double().repeat_interleave(32, 0)) if scales == "group" else (lambda t: t.double())
    wide = (wide + grow(shift)) * grow(scale) if offset else wide * grow(scale)
    assert_near(y, x.double() @ wide)


@pytest.mark.parametrize("finished", [False, True])
def test_gating(npu, finished):
    generator = fresh_generator()
    x = draw(generator, 7, 12)
    done = (torch.arange(7) % 3 == 0) if finished else None
    y, experts, rows = ops.npu_moe_gating_top_k_softmax(x.to(DEVICE), None if done is None else done.to(DEVICE), 3)
    weights, chosen = x.double().softmax(-1).sort(-1, descending=True)
    assert_near(y, weights[:, :3])
    chosen = chosen[:, :3].int()
    if done is not None:
        chosen[done] = 12
    assert torch.equal(experts.cpu(), chosen)
    assert torch.equal(rows.cpu(), torch.arange(21).view(3, 7).t().int())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("kind", [0, 1])
def test_grouped_products(npu, dtype, kind):
    generator = fresh_generator()
    sizes = [3, 0, 5, 1]
    x, w = draw(generator, 9, 24, dtype=dtype), draw(generator, 4, 24, 16, dtype=dtype) * 0.2
    listed = torch.tensor(sizes) if kind else torch.tensor(sizes).cumsum(0)
    (y,) = ops.npu_grouped_matmul(
        [x.to(DEVICE)], [w.to(DEVICE)], group_list=listed.to(DEVICE), split_item=3, group_type=0, group_list_type=kind
    )
    want = torch.cat([part.double() @ matrix.double() for part, matrix in zip(x.split(sizes), w, strict=True)])
    assert_near(y, want)


def test_separate_products(npu):
    generator = fresh_generator()
    sides = [(draw(generator, n, 8), draw(generator, 8, m)) for n, m in ((2, 3), (5, 4))]
    got = ops.npu_grouped_matmul([a.to(DEVICE) for a, _ in sides], [b.to(DEVICE) for _, b in sides], group_type=-1)
    for one, (a, b) in zip(got, sides, strict=True):
        assert_near(one, a.double() @ b.double())


def test_prefetch_changes_nothing(npu):
    weight = torch.ones(4, 4, device=DEVICE)
    assert ops.npu_prefetch(weight, None, 10**9) is None
    assert torch.equal(weight.cpu(), torch.ones(4, 4)) and npu.log.names[-2:-1] == ["npu::npu_prefetch"]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_parts_merge_by_lse(npu, dtype):
    generator = fresh_generator()
    q, k, v = (draw(generator, 1, 2, n, 16, dtype=dtype) for n in (3, 9, 9))
    full = torch.ones(3, 9, dtype=torch.bool)
    parts = [
        truth(*(t.double() for t in (q, k[:, :, s], v[:, :, s])), full[:, s], 0.3) for s in (slice(4), slice(4, 9))
    ]
    lse = [part[1].flatten().float().to(DEVICE) for part in parts]
    outs = [part[0].flatten(0, 2).to(dtype).to(DEVICE) for part in parts]
    out, merged = ops.npu_attention_update(lse, outs, 1)
    want, want_lse = truth(*(t.double() for t in (q, k, v)), full, 0.3)
    assert_near(out, want.flatten(0, 2), scale=2.0)
    assert_near(merged, want_lse.flatten())
    assert ops.npu_attention_update(lse, outs, 0)[1].isnan().all(), "the LSE is valid with update_type 1 only"


def test_parts_merge_by_max_and_sum(npu):
    generator = fresh_generator()
    q, k, v = (draw(generator, 2, 3, n, 8) for n in (4, 10, 10))
    to_sbh = lambda t: t.permute(2, 0, 1, 3).flatten(2).contiguous().to(DEVICE)  # noqa: E731
    pieces = [
        ops.npu_fusion_attention(to_sbh(q), to_sbh(k[:, :, s]), to_sbh(v[:, :, s]), 3, "SBH", scale=0.4)
        for s in (slice(3), slice(3, 10))
    ]
    out, top, total = ops.npu_ring_attention_update(*pieces[0][:3], *pieces[1][:3])
    want, lse = truth(*(t.double() for t in (q, k, v)), torch.ones(4, 10, dtype=torch.bool), 0.4)
    assert_near(out, want.permute(2, 0, 1, 3).flatten(2), scale=2.0)
    assert_near(top[..., 0] + total[..., 0].log(), lse)


# ---- what the documentation forbids


def make(*shape, dtype=torch.half):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def quant(scale=None, out=torch.float16, **more):
    scale = make(8, dtype=torch.float32) if scale is None else scale
    x, w = make(4, 32, dtype=torch.int8), make(32, 8, dtype=torch.int8)
    return ops.npu_quant_matmul(x, w, scale, output_dtype=NUMBER[out], **more)


def weight_only(x=None, w=None, scale=None, **more):
    x = make(4, 96) if x is None else x
    w = make(96, 8, dtype=torch.int8) if w is None else w
    return ops.npu_weight_quant_batchmatmul(x, w, make(8) if scale is None else scale, **more)


def grouped(listed=(3, 4), **more):
    more = {"split_item": 2, "group_type": 0, **more}
    listed = torch.tensor(listed, device=DEVICE)
    return ops.npu_grouped_matmul([make(4, 8)], [make(2, 8, 16)], group_list=listed, **more)


FORBIDDEN = {
    "float16 scale": (lambda: quant(make(8)), "scale is torch.float16"),
    "two-dimensional scale": (lambda: quant(make(1, 8, dtype=torch.float32)), "scale has shape"),
    "bfloat16 scale of float16": (lambda: quant(make(8, dtype=torch.bfloat16)), "scale is torch.bfloat16"),
    "int64 scale of bfloat16": (lambda: quant(make(8, dtype=torch.int64), torch.bfloat16), "scale is torch.int64"),
    "offset as a zero point": (lambda: quant(offset=make(8, dtype=torch.float32)), "int8 outputs only"),
    "two-dimensional per-token scale": (
        lambda: quant(pertoken_scale=make(4, 1, dtype=torch.float32)),
        r"float32 \(4,\)",
    ),
    "float16 per-token scale": (lambda: quant(pertoken_scale=make(4)), r"float32 \(4,\)"),
    "depth of the product": (
        lambda: ops.npu_quant_matmul(
            make(4, 31, dtype=torch.int8), make(32, 8, dtype=torch.int8), make(8, dtype=torch.float32)
        ),
        "x1 has k 31, x2 32",
    ),
    "dynamic quant of float32": (lambda: ops.npu_dynamic_quant(make(2, 8, dtype=torch.float32)), "float16, bfloat16"),
    "dynamic quant of one dim": (lambda: ops.npu_dynamic_quant(make(8)), "more than one"),
    "group of 48": (lambda: weight_only(scale=make(2, 8), antiquant_group_size=48), "multiple of 32"),
    "group of the whole depth": (lambda: weight_only(scale=make(1, 8), antiquant_group_size=96), "K - 1 = 95"),
    "weight-only float32": (lambda: weight_only(make(4, 96, dtype=torch.float32)), "float16, bfloat16"),
    "scale of another dtype": (lambda: weight_only(scale=make(8, dtype=torch.bfloat16)), "dtypes must be the same"),
    "three dims": (lambda: weight_only(make(1, 4, 96)), "2 dims"),
    "bias of bfloat16": (
        lambda: weight_only(
            make(4, 96, dtype=torch.bfloat16), scale=make(8, dtype=torch.bfloat16), bias=make(8, dtype=torch.bfloat16)
        ),
        "bias is torch.bfloat16",
    ),
    "k of the gate": (lambda: ops.npu_moe_gating_top_k_softmax(make(2, 8), None, 9), "k is 9"),
    "groups as sizes": (lambda: grouped((3, 1)), "must be cumulated"),
    "groups that end early": (lambda: grouped((1, 3)), "ends at 3, x has 4 rows"),
    "int32 groups": (lambda: grouped((3.0, 4.0)), "int64"),
    "split item": (lambda: grouped(split_item=0), "takes 2 or 3"),
    "activation": (lambda: grouped(act_type=5), "have an activation"),
    "prefetch of nothing": (lambda: ops.npu_prefetch(make(4), None, 0), "above 0"),
    "prefetch beyond": (lambda: ops.npu_prefetch(make(4), None, 8, 8), "offset is 8"),
    "half LSE": (lambda: ops.npu_attention_update([make(4)] * 2, [make(4, 8)] * 2, 0), "float32"),
    "parts of a merge": (lambda: ops.npu_attention_update([make(4, dtype=torch.float32)], [make(5, 8)], 0), "differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_calls(name):
    invoke, rule = FORBIDDEN[name]
    with EmulatedNPU(check_meta=False), pytest.raises(OperatorError, match=rule):
        invoke()


ON_310P = {
    "bfloat16 output": (lambda: quant(out=torch.bfloat16), "supported: torch.int8, torch.float16"),
    "per-token scale": (lambda: quant(pertoken_scale=make(4, dtype=torch.float32)), "310P does not support"),
    "groups": (lambda: weight_only(scale=make(3, 8), antiquant_group_size=32), "310P does not support groups"),
    "narrow grouped product": (
        lambda: ops.npu_grouped_matmul(
            [make(4, 8)], [make(2, 8, 24)], group_list=torch.tensor((3, 4), device=DEVICE), split_item=2, group_type=0
        ),
        "multiple of 16 on 310P",
    ),
    "grouped float32": (
        lambda: ops.npu_grouped_matmul(*[[make(8, 8, dtype=torch.float32)]] * 2, group_type=-1),
        "supported: float16",
    ),
}


@pytest.mark.parametrize("name", ON_310P)
def test_rules_of_310p(name):
    invoke, rule = ON_310P[name]
    with EmulatedNPU(soc="ascend310p", check_meta=False), pytest.raises(OperatorError, match=rule):
        invoke()


def test_packed_int4_is_not_emulated(npu):
    with pytest.raises(NoReferenceError, match="int4"):
        weight_only(w=make(96, 1, dtype=torch.int32))

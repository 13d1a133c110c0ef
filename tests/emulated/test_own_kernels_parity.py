"""Strategy "ascend_c": our Ascend C kernels behind the registry, on the emulated NPU, against the references."""

from __future__ import annotations

import pytest
import torch

from atb_modules import ops
from atb_modules.kernels.reference.mlp import gated_activation_reference
from atb_modules.kernels.reference.norm import add_rms_norm_reference, rms_norm_reference
from atb_modules.norm_linear import norm_linear
from atb_modules.testing import fresh_generator

from .borrowed import borrow, on_npu, parity_tests

globals().update(
    parity_tests(
        borrow("kernels/test_attention_parity.py", ("attention",), "ascend_c"),
        without=(
            "test_lse_is_differentiable_where_it_is_returned",  # of the eager kernel in float64
            "test_grouped_heads_read_their_own_key_head",  # head size 8, which our kernel does not take
        ),
    )
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 7), (1, 1, 1), (4, 1030), (0, 16), (130, 96)]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def emulated(npu, own_kernels):
    """Every test here computes on the emulated NPU, with our kernels loaded."""


@pytest.fixture(scope="module")
def harness():
    """The check of the elementwise parity tests: forward in every dtype, gradients in float32."""
    return borrow("kernels/test_elementwise_parity.py", (), "ascend_c")


@by_dtype
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast_first", [False, True])
def test_norms(harness, dtype, offset, cast_first):
    generator = fresh_generator()
    options = {"weight_offset": offset, "cast_first": cast_first}
    for shape in SHAPES:
        x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        weight = torch.randn(shape[-1], generator=generator).to(dtype)
        harness.check(
            lambda x, w: on_npu(ops.rms_norm)(x, w, 1e-5, strategy="ascend_c", **options),
            lambda x, w: rms_norm_reference(x, w, 1e-5, offset, cast_first),
            (x, weight),
            "rms_norm",
            rounds_inside=cast_first,
        )
        harness.check(
            lambda x, r, w: on_npu(ops.add_rms_norm)(x, r, w, 1e-5, strategy="ascend_c", **options),
            lambda x, r, w: add_rms_norm_reference(x, r, w, 1e-5, offset, cast_first),
            (x, residual, weight),
            "add_rms_norm",
            rounds_inside=True,
        )


@by_dtype
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gates(harness, dtype, kind):
    generator = fresh_generator()
    for shape in SHAPES:
        fused = 3.0 * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)
        harness.check(
            lambda g, u: on_npu(ops.gated_activation)(g, u, kind, strategy="ascend_c"),
            lambda g, u: gated_activation_reference(g, u, kind),
            fused.split(shape[-1], dim=-1),
            kind,
        )


@by_dtype
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_into_pages(dtype, interleaved):
    generator = fresh_generator()
    k, v = torch.randn(2, 7, 3, 32, generator=generator).to(dtype)
    q, slots = torch.randn(7, 6, 32, generator=generator).to(dtype), torch.tensor([5, 0, -1, 16, 31, 47, 20])
    cos, sin = torch.rand(2, 7, 12, generator=generator)
    results = []
    for call, strategy in ((lambda f: f, "torch"), (on_npu, "ascend_c")):
        pages, queries = torch.zeros(2, 3, 3, 16, 32, dtype=dtype), q.clone()
        tensors = (queries, k, v, cos, sin, pages[0].clone(), pages[1].clone(), slots)
        call(ops.rotary_append)(*tensors, interleaved=interleaved, strategy=strategy)
        results.append((tensors[0], tensors[5], tensors[6]))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.abs().sum() > 0


@pytest.mark.parametrize("layout", ["one projection", "heads apart", "heads first", "channels apart", "expanded"])
def test_rotation_of_views(layout):
    """Queries are turned where they lie, and what lies between them stays."""
    generator = fresh_generator()
    x = torch.randn(7, 12, 64, generator=generator)
    slots, (cos, sin) = torch.tensor([5, 0, -1, 16, 31, 47, 20]), torch.rand(2, 7, 12, generator=generator)
    results = []
    for device, strategy in (("cpu", "torch"), ("npu:0", "ascend_c")):
        whole = x.clone().to(device)
        if layout == "heads first":
            whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
        views = {"one projection": whole, "channels apart": whole[..., ::2]}.get(layout, whole[..., :32])
        q, k, v = views.split([6, 3, 3], dim=1)
        if layout == "expanded":
            k, v = k[:, :1].expand(7, 3, 32), v[:1].expand(7, 3, 32)
        pages = [torch.zeros(3, 3, 16, q.shape[-1]).to(device) for _ in range(2)]
        where = (*(t.to(device) for t in (cos, sin)), *pages, slots.to(device))
        ops.rotary_append(q, k, v, *where, interleaved=False, strategy=strategy)
        results.append([t.cpu() for t in (whole, *pages)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.abs().sum() > 0


@by_dtype
def test_a_norm_with_its_product(dtype):
    generator = fresh_generator()
    for rows, inner, outer, bias in ((1, 64, 130, False), (33, 576, 96, True), (7, 100, 17, False), (0, 16, 16, True)):
        x, norm_weight = torch.randn(rows, inner, generator=generator), torch.rand(inner, generator=generator)
        weight = torch.randn(outer, inner, generator=generator) / inner**0.5
        tensors = [t.to(dtype) for t in (x, norm_weight, weight)]
        extra = torch.randn(outer, generator=generator).to(dtype) if bias else None
        with torch.no_grad():
            out = on_npu(norm_linear)(*tensors, extra, 1e-5, strategy="ascend_c")
        expected = norm_linear(*tensors, extra, 1e-5, strategy="reference")
        step = max(torch.finfo(dtype).eps, 1e-5)  # a normed value may round the other way, once
        torch.testing.assert_close(out, expected, atol=4 * step, rtol=2 * step)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_wider_weight_multiplies_what_was_rounded(npu, dtype, offset):
    generator = fresh_generator()
    x, weight = torch.randn(33, 100, generator=generator).to(dtype), torch.randn(100, generator=generator)
    options = {"weight_offset": offset, "cast_first": True}
    npu.log.clear()
    out = on_npu(ops.rms_norm)(x, weight, 1e-5, strategy="ascend_c", **options)
    assert "atb_modules::ascend_rms_norm" in npu.log.names
    step = torch.finfo(dtype).eps  # a normed value may round the other way, once
    torch.testing.assert_close(out, rms_norm_reference(x, weight, 1e-5, offset, True), atol=step, rtol=2 * step)


def test_what_they_refuse_names_the_rule():
    q = torch.randn(1, 2, 4, 24).to("npu:0")
    for call, message in (
        (lambda: ops.attention(q, q, q, strategy="ascend_c"), "head sizes up to 256 in steps of 16, the call has 24"),
        (lambda: ops.gated_activation(q, q, "gelu", strategy="ascend_c"), "silu or gelu_tanh, the call asks for gelu"),
        (lambda: norm_linear(q, None, q[0, 0].half(), strategy="ascend_c"), "takes weights of float32, not float16"),
    ):
        with pytest.raises(ValueError, match=message):
            call()

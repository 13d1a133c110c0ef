"""Every kernel of modulated norms and of the feed-forward with the norm behind it against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import ops
from atb_modules.kernels.reference.mlp import mlp_residual_norm_reference
from atb_modules.kernels.reference.norm import modulated_norm_reference
from atb_modules.testing import assert_parity, fresh_generator, poisoned_memory
from atb_modules.testing.devices import strategies_under_test

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = ["layernorm", "rmsnorm"]


def strategies(op):
    return pytest.mark.parametrize("strategy", strategies_under_test(op), ids=str)


def randn(shape, generator, dtype=torch.float32):
    return torch.randn(shape, generator=generator).to(dtype)


def wide(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def leaves(tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def compare_gradients(outputs, truths, mine, theirs):
    """Gradients of random sums of the outputs, in all tensors that are there."""
    weights = [torch.randn(t.shape, dtype=torch.float64) for t in truths]
    pick = lambda ts: [t for t in ts if t is not None]  # noqa: E731
    total = sum((out * weight.to(out.dtype)).sum() for out, weight in zip(outputs, weights, strict=True))
    golden = sum((out * weight).sum() for out, weight in zip(truths, weights, strict=True))
    got, want = torch.autograd.grad(total, pick(mine)), torch.autograd.grad(golden, pick(theirs))
    for one, truth in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), truth, atol=5e-4, rtol=5e-4)


def modulated_truth(x, scale, shift, weight, bias, layer_norm):
    """The reference over rows, for a modulation that broadcasts to x."""
    scale, shift = (t.expand(x.shape).reshape(-1, x.shape[-1]) for t in (scale, shift))
    flat = x.reshape(-1, x.shape[-1])
    return modulated_norm_reference(flat, scale, shift, weight, bias, 1e-6, layer_norm).reshape(x.shape)


@strategies("modulated_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("affine", [False, True])
def test_modulated_norm(strategy, dtype, norm_type, affine):
    generator, layer_norm = fresh_generator(), norm_type == "layernorm"
    for batch, length, width in ((2, 5, 64), (3, 1, 7), (1, 4, 130), (0, 3, 16), (2, 0, 16), (3, 41, 1030)):
        x = randn((batch, length, width), generator, dtype)
        weight = randn((width,), generator, dtype) if affine else None
        bias = randn((width,), generator, dtype) if affine and layer_norm else None
        for lead in ((batch, 1), (batch, length), (1, 1), (1, length)):
            # Parts of one projection, as a module has them.
            shift, scale = randn((*lead, 2 * width), generator, dtype).chunk(2, -1)
            tensors = (x, scale, shift, weight, bias)
            truths = wide(tensors)
            golden = modulated_truth(*truths, layer_norm)
            call = lambda *t: ops.modulated_norm(*t, norm_type=norm_type, strategy=strategy)  # noqa: E731
            with poisoned_memory():
                out = call(*tensors)
            assert_parity(out, golden.detach(), reduction=width, what=f"{norm_type} {lead}")
            if dtype == torch.float32:
                mine = leaves(tensors)
                compare_gradients([call(*mine)], [golden], mine, truths)


@strategies("modulated_norm")
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), whole=st.lists(st.booleans(), min_size=4, max_size=4))
def test_modulations_broadcast_over_any_axes(strategy, sizes, whole):
    generator = fresh_generator()
    x = randn((*sizes, 20), generator)
    lead = [size if keep else 1 for size, keep in zip(sizes, whole, strict=False)]
    scale, shift = randn((*lead, 20), generator), randn((*lead, 20), generator)
    expected = modulated_truth(x, scale, shift, None, None, True)
    torch.testing.assert_close(ops.modulated_norm(x, scale, shift, strategy=strategy), expected)
    strided = x.transpose(0, -1).contiguous().transpose(0, -1)
    torch.testing.assert_close(ops.modulated_norm(strided, scale, shift, strategy=strategy), expected)


def chain_tensors(generator, rows=(2, 5), hidden=24, width=40, gated=True, layer_norm=True, dtype=torch.float32):
    shapes = [(*rows, hidden), (*rows, hidden), (hidden, width) if gated else None, (hidden, width), (width, hidden)]
    shapes += [(hidden,), (hidden,) if layer_norm else None]
    tensors = [None if shape is None else torch.randn(shape, generator=generator) for shape in shapes]
    for index in (2, 3, 4):
        if tensors[index] is not None:
            tensors[index] = tensors[index] / tensors[index].shape[0] ** 0.5
    return [None if t is None else t.to(dtype) for t in tensors]


def run_chain(tensors, norm_type, strategy, **options):
    *main, norm_weight, norm_bias = tensors
    names = {"norm_weight": norm_weight, "norm_bias": norm_bias, "norm_type": norm_type, "strategy": strategy}
    return ops.fused_mlp_residual_norm(*main, **names, **options)


def chain_truth(tensors, norm_type, kind="silu", keep=None, scale=1.0):
    x, residual, gate, up, down, norm_weight, norm_bias = tensors
    gate = None if gate is None else gate.t()
    parameters = (norm_weight, norm_bias, 1e-6, norm_type == "layernorm")
    return mlp_residual_norm_reference(x, residual, gate, up.t(), down.t(), kind, keep, scale, *parameters)


@strategies("fused_mlp_residual_norm")
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_mlp_residual_norm(strategy, norm_type, kind, gated, dropout_p):
    generator = fresh_generator()
    for rows, hidden, width in (((2, 5), 24, 40), ((1,), 7, 5), ((3, 11), 64, 33), ((0, 4), 8, 8)):
        tensors = chain_tensors(generator, rows, hidden, width, gated, norm_type == "layernorm")
        options = {"kind": kind, "dropout_p": dropout_p}
        torch.manual_seed(5)
        keep = (torch.rand(*rows, hidden) >= dropout_p).to(torch.uint8) if dropout_p else None
        truths, mine = wide(tensors), leaves(tensors)
        golden = chain_truth(truths, norm_type, kind, keep, 1 / (1 - dropout_p))
        torch.manual_seed(5)
        with poisoned_memory():
            alone = run_chain(tensors, norm_type, strategy, **options)
        torch.manual_seed(5)
        recorded = run_chain(mine, norm_type, strategy, **options)
        for outputs in (alone, recorded):
            for out, truth in zip(outputs, golden, strict=True):
                assert_parity(out.detach(), truth.detach(), reduction=2048, what=kind)
        compare_gradients(recorded, golden, mine, truths)


@strategies("fused_mlp_residual_norm")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("rows", [(3,), (2, 20)])
def test_mlp_residual_norm_in_half_precision(strategy, dtype, norm_type, rows):
    """At most twice the error of the same chain written out in this dtype, as each product rounds to it."""
    generator = fresh_generator()
    tensors = chain_tensors(generator, rows, 64, 96, True, norm_type == "layernorm", dtype)
    golden = chain_truth(wide(tensors), norm_type)
    x, residual, gate, up, down, norm_weight, norm_bias = tensors
    h = residual + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
    norm = ops.layer_norm if norm_type == "layernorm" else ops.rms_norm
    parameters = (norm_weight, norm_bias) if norm_type == "layernorm" else (norm_weight,)
    plain = (norm(h, *parameters, 1e-6, strategy="torch"), h)
    for out, truth, rough in zip(run_chain(tensors, norm_type, strategy), golden, plain, strict=True):
        allowed = 2 * (rough.double() - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        assert out.dtype == dtype and (out.double() - truth).abs().max() <= allowed


@strategies("fused_mlp_residual_norm")
def test_without_dropout_the_chain_is_its_parts(strategy):
    tensors = chain_tensors(fresh_generator(), layer_norm=False)
    x, residual, gate, up, down, norm_weight, _ = tensors
    before = [x.clone(), residual.clone()]
    y, h = run_chain(tensors, "rmsnorm", strategy)
    torch.testing.assert_close(h, residual + ops.fused_mlp(x, gate, up, down), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y, ops.rms_norm(h, norm_weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    torch.manual_seed(3)
    first = run_chain(tensors, "rmsnorm", strategy, dropout_p=0.5)
    second = run_chain(tensors, "rmsnorm", strategy, dropout_p=0.5)
    torch.manual_seed(3)
    third = run_chain(tensors, "rmsnorm", strategy, dropout_p=0.5)
    assert torch.equal(first[1], third[1]) and not torch.equal(first[1], second[1])
    dropped = (first[1] == residual).double().mean()
    assert 0.3 < dropped < 0.7


@pytest.mark.parametrize("norm_type", NORMS)
def test_native_ops_pass_opcheck_and_compile(norm_type):
    generator, layer_norm = fresh_generator(), norm_type == "layernorm"
    x, residual = randn((6, 20), generator).requires_grad_(), randn((6, 20), generator).requires_grad_()
    keep = (torch.rand(6, 20, generator=generator) > 0.5).to(torch.uint8)
    weight = randn((20,), generator).requires_grad_()
    native = torch.ops.atb_modules
    options = (weight, None, 1e-6, 0.0, False, layer_norm)
    torch.library.opcheck(native.drop_add_norm.default, (x, residual, keep, 2.0, *options))
    scale, shift = randn((3, 20), generator).requires_grad_(), randn((3, 20), generator).requires_grad_()
    torch.library.opcheck(native.modulated_norm.default, (x, scale, shift, weight, None, 1e-6, layer_norm))
    tensors = leaves(chain_tensors(generator, layer_norm=layer_norm))

    def both(*tensors):
        y, h = run_chain(tensors, norm_type, "auto")
        return ops.modulated_norm(y, h[:, :1], h[:, :1], norm_type=norm_type), h

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*tensors), both(*tensors), strict=True):
        torch.testing.assert_close(got, want)


def test_large_tensors_are_streamed_alike():
    """From 8 MB on the native norm writes past the caches, by other code."""
    generator = fresh_generator()
    x, residual = randn((1040, 2064), generator), randn((1040, 2064), generator)
    keep = (torch.rand(x.shape, generator=generator) > 0.5).to(torch.uint8)
    scale, shift = randn((4, 2064), generator), randn((4, 2064), generator)
    native = torch.ops.atb_modules
    out, total = native.drop_add_norm(x, residual, keep, 2.0, None, None, 1e-6, 0.0, False, True)
    part, part_total = native.drop_add_norm(x[:9], residual[:9], keep[:9], 2.0, None, None, 1e-6, 0.0, False, True)
    assert torch.equal(out[:9], part) and torch.equal(total[:9], part_total)
    assert torch.equal(total, x * keep * 2.0 + residual)
    whole = native.modulated_norm(x, scale, shift, None, None, 1e-6, False)
    for group in range(4):
        rows = slice(260 * group, 260 * (group + 1))
        one = slice(group, group + 1)
        assert torch.equal(whole[rows], native.modulated_norm(x[rows], scale[one], shift[one], None, None, 1e-6, False))


def test_what_does_not_fit_is_refused():
    x, row = torch.randn(2, 3, 8), torch.randn(2, 8)
    up, down = torch.randn(8, 12), torch.randn(12, 8)
    norm, chain = ops.modulated_norm, ops.fused_mlp_residual_norm
    for call, error, message in (
        (lambda: norm(x, row, row[:1]), ValueError, "scale has shape .*; shift has .*, they must be equal"),
        (lambda: norm(x, row[:, :4], row[:, :4]), ValueError, "scale has shape .*x of shape"),
        (lambda: norm(x, row[:1].expand(3, 8), row[:1].expand(3, 8)), ValueError, "scale has shape"),
        (lambda: norm(x, row.half(), row.half()), TypeError, "scale is torch.float16; x is torch.float32"),
        (lambda: norm(x, row, row, torch.ones(4)), ValueError, "weight has shape"),
        (lambda: norm(x, row, row, None, torch.ones(8), norm_type="rmsnorm"), ValueError, "bias is given with"),
        (lambda: norm(x, row, row, norm_type="batchnorm"), ValueError, "norm_type is 'batchnorm'"),
        (lambda: norm(x, row, row, eps=-1.0), ValueError, "eps is -1.0"),
        (lambda: norm(x, row.to("meta"), row.to("meta")), ValueError, "scale is on meta; x is on cpu"),
        (lambda: norm(x.double(), row.double(), row.double(), strategy="cpu"), ValueError, "not torch.float64"),
        (lambda: chain(x, x[:1], None, up, down), ValueError, "residual has shape"),
        (lambda: chain(x, x, up[:4], up, down), ValueError, "x has shape .*gate_w"),
        (lambda: chain(x, x, None, up, down[:4]), ValueError, "x @ up_w has 12 features; down_w of shape"),
        (lambda: chain(x, x, None, up, down[:, :4]), ValueError, "down_w has shape .*needs as many columns"),
        (lambda: chain(x, x, None, up, down, dropout_p=1.0), ValueError, "dropout_p is 1.0"),
        (lambda: chain(x, x, None, up, down, kind="tanh"), ValueError, "kind is 'tanh'"),
        (lambda: chain(x, x, None, up, down, norm_bias=torch.ones(8)), ValueError, "norm_bias is given with"),
        (lambda: chain(x, x, None, up, down, norm_weight=torch.ones(4)), ValueError, "norm_weight has shape"),
    ):
        with pytest.raises(error, match=message):
            call()

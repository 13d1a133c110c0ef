"""Norms, gated activations, rotary, append and linear against float64 formulas; gradients; opcheck; strides."""

import math

import pytest
import torch
import torch.nn.functional as F

from atb_modules.kernels.cpu import ops_activation

OPS = torch.ops.atb_modules
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def close(got, want, step):
    torch.testing.assert_close(got.double(), want.double(), atol=step, rtol=step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 64, 577])
def test_norms(isa, width, dtype):
    x, y = torch.randn(3, 5, width).to(dtype), torch.randn(3, 5, width).to(dtype)
    w, b = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    step = 4 * STEP[dtype]
    scaled = F.rms_norm(x.double(), (width,), eps=1e-5)
    close(OPS.rms_norm(x, w, 1e-5, 1.0, False), scaled * (1 + w.double()), step)
    close(OPS.rms_norm(x, None, 1e-5, 0.0, True), scaled, step)
    close(OPS.layer_norm(x, w, b, 1e-5), F.layer_norm(x.double(), (width,), w.double(), b.double(), 1e-5), step)
    total = x + y
    for normed, summed in (OPS.add_rms_norm(x, y, w, 1e-5, 0.0, False), OPS.add_layer_norm(x, y, None, None, 1e-5)):
        assert torch.equal(summed, total)
        assert normed.shape == x.shape
    close(OPS.add_rms_norm(x, y, w, 1e-5, 0.0, False)[0], OPS.rms_norm(total, w, 1e-5, 0.0, False), 0.0)
    close(OPS.add_layer_norm(x, y, w, b, 1e-5)[0], OPS.layer_norm(total, w, b, 1e-5), 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 64, 577])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_norms_in_chains(isa, layer_norm, width, dtype):
    x, y = torch.randn(6, width).to(dtype), torch.randn(6, width).to(dtype)
    w, keep = torch.randn(width).to(dtype), (torch.rand(6, width) < 0.5).to(torch.uint8)
    norm = F.layer_norm if layer_norm else F.rms_norm
    out, total = OPS.drop_add_norm(x, y, keep, 1.5, w, None, 1e-5, 0.0, False, layer_norm)
    close(total, x.double() * keep * 1.5 + y.double(), STEP[dtype])
    close(out, norm(total.double(), (width,), w.double(), eps=1e-5), 6 * STEP[dtype])
    shift, scale = torch.randn(2, 2 * width).to(dtype).chunk(2, -1)
    normed = norm(x.double(), (width,), w.double(), eps=1e-5).reshape(2, 3, width)
    want = normed * (1 + scale.double().unsqueeze(1)) + shift.double().unsqueeze(1)
    close(OPS.modulated_norm(x, scale, shift, w, None, 1e-5, layer_norm), want.reshape(6, width), 6 * STEP[dtype])


def test_cast_order_is_llamas(isa):
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * w
    differing = (OPS.rms_norm(x, w, 1e-6, 0.0, True) != normed).float().mean()
    # The square root may round differently by one step, which moves few elements; the other order moves a quarter.
    assert differing < 0.01
    assert (OPS.rms_norm(x, w, 1e-6, 0.0, False) != normed).float().mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activation(isa, kind, dtype):
    fused = (torch.randn(3, 7, 2 * 37) * 4).to(dtype)
    gate, up = fused.chunk(2, -1)
    close(OPS.gated_activation(gate, up, kind), ACTIVATIONS[kind](gate.double()) * up.double(), 6 * STEP[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 7, 33, 577])
def test_gradients_of_gates_with_a_factor_a_row(isa, width, kind, dtype):
    both, upstream, factors = (4 * torch.randn(7, 2 * width)).to(dtype), torch.randn(7, width).to(dtype), torch.rand(7)
    gate, up = both.split(width, dim=1)  # views into longer rows
    grads, out, d_factors = torch.empty_like(both), torch.empty_like(upstream), torch.empty(7)
    d_gate, d_up = grads.split(width, dim=1)
    ops_activation.gated_backward_out(
        upstream, gate, up, kind, d_gate, d_up, factors=factors, out=out, d_factors=d_factors
    )
    leaves = [t.double().requires_grad_() for t in (gate, up, factors)]
    hidden = ACTIVATIONS[kind](leaves[0]) * leaves[1]
    wanted = torch.autograd.grad(hidden * leaves[2].unsqueeze(1), leaves, upstream.double())
    for got, want in zip((d_gate, d_up), wanted[:2], strict=True):
        close(got, want, 6 * STEP[dtype])
    close(out, hidden.detach(), 6 * STEP[dtype])
    torch.testing.assert_close(d_factors.double(), wanted[2], atol=2e-5 * width, rtol=2e-5)
    # without up, factors and what else may be left out
    alone = torch.empty_like(upstream)
    ops_activation.gated_backward_out(upstream, gate, None, kind, alone, None)
    (want,) = torch.autograd.grad(ACTIVATIONS[kind](leaves[0]), leaves[0], upstream.double())
    close(alone, want, 6 * STEP[dtype])


def test_gradients_of_gates_at_the_ends(isa):
    x = torch.tensor([0.0, -0.0, 1e-30, 20.0, -20.0, 90.0, -90.0, 1e20, -1e20, 3e38, -3e38, float("nan")])
    for kind, function in ACTIVATIONS.items():
        leaf = x.double().requires_grad_()
        (want,) = torch.autograd.grad(function(leaf).sum(), leaf)
        got = OPS.gated_activation_backward(torch.ones_like(x), x, torch.ones_like(x), kind)[0]
        finite = want.isfinite() & (want.abs() < 3e38)
        torch.testing.assert_close(got[finite].double(), want[finite], atol=2e-6, rtol=2e-6)
        assert got[-1].isnan()
        assert got[:-1].isfinite().all() or kind == "relu2"


def test_gates_of_one_number():
    gate, up = torch.tensor(1.5, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = OPS.gated_activation(gate, up, "silu")
    torch.testing.assert_close(out, F.silu(gate) * up)
    for got, want in zip(
        torch.autograd.grad(out, [gate, up]), torch.autograd.grad(F.silu(gate) * up, [gate, up]), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_gradient_of_the_gradient_of_a_gate():
    for kind in ACTIVATIONS:
        gate, up = (torch.randn(3, 5).double().float().requires_grad_() for _ in range(2))
        first = torch.autograd.grad(OPS.gated_activation(gate, up, kind).square().sum(), [gate, up], create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), [gate, up])
        wide = [t.detach().double().requires_grad_() for t in (gate, up)]
        plain = torch.autograd.grad((ACTIVATIONS[kind](wide[0]) * wide[1]).square().sum(), wide, create_graph=True)
        truth = torch.autograd.grad(sum(t.square().sum() for t in plain), wide)
        for got, want in zip(second, truth, strict=True):
            torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)


def test_activation_ends(isa):
    x = torch.tensor([-math.inf, -1e4, -100.0, -90.0, -0.0, 0.0, 90.0, 1e4, math.inf, math.nan] * 4)
    one = torch.ones_like(x)
    for kind, function in ACTIVATIONS.items():
        got, want = OPS.gated_activation(x, one, kind), function(x)
        finite = x.isfinite()
        close(got[finite], want[finite], 1e-6)
        assert got[x.isnan()].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim,half", [(64, 32), (20, 5), (7, 3), (16, 0)])
def test_rotary(isa, head_dim, half, interleaved, dtype):
    fused = torch.randn(9, 6, head_dim).to(dtype)
    x, angle = fused[:, 1:4], torch.rand(9, half) * 6
    want = x.double().clone()
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for i, (a, b) in enumerate(pairs):
        c, s = angle[:, i, None].double().cos(), angle[:, i, None].double().sin()
        want[..., a] = x[..., a] * c - x[..., b] * s
        want[..., b] = x[..., b] * c + x[..., a] * s
    close(OPS.rotary(x, angle.cos(), angle.sin(), interleaved), want, 2 * STEP[dtype])


@pytest.mark.parametrize("page_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append(isa, dtype, page_dtype):
    tokens, heads, kv_heads, head_dim, page = 6, 4, 2, 24, 4
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    cos, sin = torch.rand(tokens, 8), torch.rand(tokens, 8)
    slots = torch.tensor([0, 11, -1, 5, 6, 7])
    want_q, want_k = OPS.rotary(q, cos, sin, False), OPS.rotary(k.float(), cos, sin, False)
    k_pages, v_pages = (torch.full((3, kv_heads, page, head_dim), math.nan).to(page_dtype) for _ in range(2))
    OPS.rotary_append(q, k, v, cos, sin, k_pages, v_pages, slots, False)
    assert torch.equal(q, want_q)
    for pages, rows in ((k_pages, want_k), (v_pages, v)):
        flat = pages.transpose(1, 2).reshape(-1, kv_heads, head_dim)
        kept = slots[slots >= 0]
        assert torch.equal(flat[kept], rows[slots >= 0].to(page_dtype))
        untouched = torch.ones(len(flat), dtype=torch.bool).index_fill(0, kept, False)
        assert flat[untouched].isnan().all()
    OPS.cache_append(k, v, k_pages, v_pages, slots)
    assert torch.equal(k_pages.transpose(1, 2).reshape(-1, kv_heads, head_dim)[0], k[0].to(page_dtype))


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(isa, dtype, weight_dtype):
    for rows, k, n in ((1, 576, 40), (3, 65, 7), (16, 200, 33), (17, 64, 1500), (0, 8, 8), (2, 1, 3)):
        x, w, b = torch.randn(rows, k).to(dtype), (torch.randn(n, k) / k**0.5).to(weight_dtype), torch.randn(n)
        want = x.double() @ w.double().T
        close(OPS.linear(x, w, None), want, 4 * STEP[dtype])
        close(OPS.linear(x, w, b), want + b.double(), 4 * STEP[dtype])
        out = torch.full((rows, n), math.nan, dtype=dtype)
        OPS.linear.out(x, w, b, out=out)
        assert torch.equal(out, OPS.linear(x, w, b))


def test_empty_and_strided_inputs(isa):
    w = torch.randn(16)
    assert OPS.rms_norm(torch.empty(0, 16), w, 1e-5, 0.0, False).shape == (0, 16)
    assert OPS.gated_activation(torch.empty(2, 0), torch.empty(2, 0), "silu").shape == (2, 0)
    base = torch.randn(4, 6, 32)
    for x in (base[:, :, :16], base[:, :, ::2], base[:, 1:3, 8:24], base.transpose(0, 2)[:16].transpose(0, 2)):
        assert torch.equal(OPS.rms_norm(x, w, 1e-5, 0.0, False), OPS.rms_norm(x.contiguous(), w, 1e-5, 0.0, False))
    x = torch.randn(16).expand(5, 16)
    assert torch.equal(OPS.layer_norm(x, w, w, 1e-5), OPS.layer_norm(x.contiguous(), w, w, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype):
    def leaf(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    x, y, w, b, up = leaf(4, 3, 24), leaf(4, 3, 24), leaf(24), leaf(24), leaf(4, 3, 24)
    matrix = leaf(10, 24)
    flat, angle = leaf(5, 2, 24), torch.rand(5, 6)

    def rms(x, w):
        return F.rms_norm(x, (24,), w, 1e-5)

    cases = [
        (lambda x, w: OPS.rms_norm(x, w, 1e-5, 0.0, False), rms, (x, w)),
        (lambda x, w: OPS.rms_norm(x, w, 1e-5, 1.0, False), lambda x, w: rms(x, 1 + w), (x, w)),
        (
            lambda x, y, w: sum(OPS.add_rms_norm(x, y, w, 1e-5, 0.0, False)),
            lambda x, y, w: rms(x + y, w) + x + y,
            (x, y, w),
        ),
        (lambda x, w, b: OPS.layer_norm(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, (24,), w, b, 1e-5), (x, w, b)),
        (
            lambda x, y, w, b: OPS.add_layer_norm(x, y, w, b, 1e-5)[0],
            lambda x, y, w, b: F.layer_norm(x + y, (24,), w, b, 1e-5),
            (x, y, w, b),
        ),
        (lambda x, m, b: OPS.linear(x, m, b), F.linear, (x, matrix, leaf(10))),
        (
            lambda x: OPS.rotary(x, angle.cos(), angle.sin(), False),
            lambda x: torch.cat(
                [
                    x[..., :6] * angle.cos()[:, None] - x[..., 6:12] * angle.sin()[:, None],
                    x[..., 6:12] * angle.cos()[:, None] + x[..., :6] * angle.sin()[:, None],
                    x[..., 12:],
                ],
                -1,
            ),
            (flat,),
        ),
    ]
    for kind, function in ACTIVATIONS.items():
        cases.append(
            (
                lambda x, up, kind=kind: OPS.gated_activation(x, up, kind),
                lambda x, up, function=function: function(x) * up,
                (x, up),
            )
        )
    step = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    for ours, formula, leaves in cases:
        out = ours(*leaves)
        grad = torch.randn_like(out)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        got = torch.autograd.grad(out, leaves, grad)
        want = torch.autograd.grad(formula(*wide), wide, grad.double())
        for a, b_ in zip(got, want, strict=True):
            assert a.dtype == dtype
            close(a, b_, step)


def test_opcheck():
    x, y, w, b = torch.randn(4, 3, 24), torch.randn(4, 3, 24), torch.randn(24), torch.randn(24)
    out, total = torch.empty_like(x), torch.empty_like(x)
    cos, sin = torch.rand(4, 8), torch.rand(4, 8)
    pages = torch.zeros(3, 3, 4, 24), torch.zeros(3, 3, 4, 24)
    slots = torch.tensor([0, 5, -1, 11])
    codes, scales = torch.zeros(2, 3, 3, 4, 24, dtype=torch.int8), torch.zeros(2, 3, 3)
    leaf = x.clone().requires_grad_()
    for op, args, kwargs in (
        (OPS.rms_norm.default, (leaf, w, 1e-5, 0.0, False), {}),
        (OPS.rms_norm.out, (x, w, 1e-5, 0.0, False), {"out": out}),
        (OPS.add_rms_norm.default, (leaf, y, w, 1e-5, 0.0, False), {}),
        (OPS.add_rms_norm.out, (x, y, w, 1e-5, 0.0, False), {"out": out, "sum_out": total}),
        (OPS.layer_norm.default, (leaf, w, b, 1e-5), {}),
        (OPS.layer_norm.out, (x, w, b, 1e-5), {"out": out}),
        (OPS.add_layer_norm.default, (leaf, y, w, b, 1e-5), {}),
        (OPS.add_layer_norm.out, (x, y, w, b, 1e-5), {"out": out, "sum_out": total}),
        (OPS.gated_activation.default, (leaf, y, "gelu"), {}),
        (OPS.gated_activation.out, (x, y, "gelu"), {"out": out}),
        (OPS.gated_activation_backward.default, (x, y, out, "gelu"), {}),
        (OPS.rotary.default, (leaf, cos, sin, True), {}),
        (OPS.rotary.out, (x, cos, sin, True), {"out": out}),
        (OPS.rotary_append.default, (torch.randn(4, 6, 24), x, y, cos, sin, *pages, slots, False), {}),
        (OPS.cache_append.default, (x, y, *pages, slots), {}),
        (OPS.cache_append.default, (x, y, *codes.unbind(), torch.arange(4), *scales.unbind()), {}),
        (OPS.linear.default, (leaf, torch.randn(5, 24), None), {}),
        (OPS.linear.out, (x, torch.randn(5, 24), None), {"out": torch.empty(4, 3, 5)}),
    ):
        torch.library.opcheck(op, args, kwargs)


def test_bad_arguments_are_named():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"weight must have shape \(8,\), got \(7,\)"):
        OPS.rms_norm(x, torch.ones(7), 1e-5, 0.0, False)
    with pytest.raises(TypeError, match=r"x must be float32, bfloat16 or float16.*float64"):
        OPS.rms_norm(x.double(), None, 1e-5, 0.0, False)
    with pytest.raises(ValueError, match="kind must be one of"):
        OPS.gated_activation(x, x, "tanh")
    with pytest.raises(ValueError, match=r"up must have the shape \(4, 8\)"):
        OPS.gated_activation(x, x[:3], "silu")
    with pytest.raises(ValueError, match=r"x must be \(\.\.\., in\) and weight \(out, in\)"):
        OPS.linear(x, torch.ones(3, 9), None)
    with pytest.raises(ValueError, match="out must be contiguous"):
        OPS.rms_norm.out(x, None, 1e-5, 0.0, False, out=torch.empty(8, 4).t())

"""Every kernel of a mixture of experts against the float64 reference: routing of any shape, three dtypes, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import ops
from atb_modules.kernels.reference.moe import moe_reference
from atb_modules.testing import assert_parity, fresh_generator, poisoned_memory
from atb_modules.testing.devices import strategies_under_test

STRATEGIES = strategies_under_test("moe")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up: F.relu(gate).square() * up,
}
NAMES = ("x", "weights", "up_proj", "down_proj", "up_bias", "down_bias")


def draw(generator, tokens=9, hidden=24, width=20, num_experts=5, top_k=2, gated=True, bias=True, dtype=torch.float32):
    """(experts, tensors): a random routing and what goes with it."""
    scores = torch.rand(tokens, num_experts, generator=generator)
    experts = scores.topk(top_k).indices
    rows = 2 * width if gated else width
    shapes = [(tokens, hidden), (tokens, top_k), (num_experts, rows, hidden), (num_experts, hidden, width)]
    shapes += [(num_experts, rows), (num_experts, hidden)] if bias else []
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[1] = tensors[1].sigmoid()
    tensors[2], tensors[3] = tensors[2] / hidden**0.5, tensors[3] / width**0.5
    return experts, [t.to(dtype) for t in tensors] + [None] * (6 - len(tensors))


def run(strategy, experts, tensors, kind, gated):
    x, weights, up_proj, down_proj, up_bias, down_bias = tensors
    options = {"up_bias": up_bias, "down_bias": down_bias, "kind": kind, "gated": gated}
    return ops.moe(x, experts, weights, up_proj, down_proj, strategy=strategy, **options)


def plain(experts, tensors, kind, gated):
    """One expert after the other in the tensors' dtype, as transformers' eager blocks do: the yardstick."""
    x, weights, *parts = tensors
    out = torch.zeros_like(x)
    for number in range(parts[0].shape[0]):
        up_proj, down_proj, up_bias, down_bias = (None if p is None else p[number] for p in parts)
        token, choice = (experts == number).nonzero(as_tuple=True)
        hidden = F.linear(x[token], up_proj, up_bias)
        hidden = ops.activation(hidden, kind) if not gated else PLAIN[kind](*hidden.chunk(2, -1))
        out.index_add_(0, token, F.linear(hidden, down_proj, down_bias) * weights[token, choice, None])
    return out


def assert_close_to(golden, out, strategy, experts, tensors, kind, gated):
    """Parity; a kernel that computes in half precision itself errs at most twice as much as the plain form."""
    if strategy.value != "torch" or out.dtype == torch.float32:
        assert_parity(out.detach(), golden.detach(), reduction=64, what=kind)
    elif out.numel():
        allowed = 2 * (plain(experts, tensors, kind, gated).double() - golden).abs().max()
        allowed = allowed + torch.finfo(out.dtype).eps * golden.abs().max()
        assert (out.double() - golden).abs().max() <= allowed


def check(strategy, experts, tensors, kind="silu", gated=True):
    """Forward parity; in float32 every gradient, that of the router's weights too."""
    wide = [None if t is None else t.double().requires_grad_() for t in tensors]
    golden = moe_reference(wide[0], experts, *wide[1:], kind, gated)
    mine = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    with poisoned_memory():
        alone = run(strategy, experts, tensors, kind, gated)
        out = run(strategy, experts, mine, kind, gated)
    for result in (alone, out):
        assert_close_to(golden, result, strategy, experts, tensors, kind, gated)
    if tensors[0].dtype != torch.float32:
        return
    weight = torch.randn(golden.shape, dtype=torch.float64)
    leaves = [t for t in mine if t is not None]
    got = torch.autograd.grad((out * weight.float()).sum(), leaves)
    want = torch.autograd.grad((golden * weight).sum(), [t for t in wide if t is not None])
    for name, one, truth in zip(NAMES, got, want, strict=False):
        torch.testing.assert_close(one.double(), truth, atol=2e-4, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_moe(strategy, dtype, kind, gated):
    experts, tensors = draw(fresh_generator(), gated=gated, dtype=dtype)
    check(strategy, experts, tensors, kind, gated)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(0, 40),
    hidden=st.integers(1, 33),
    width=st.integers(1, 33),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    gated=st.booleans(),
    bias=st.booleans(),
)
def test_any_size(strategy, tokens, hidden, width, num_experts, top_k, gated, bias):
    sizes = (tokens, hidden, width, num_experts, min(top_k, num_experts), gated, bias)
    experts, tensors = draw(fresh_generator(), *sizes)
    check(strategy, experts, tensors, gated=gated)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 70])
def test_all_tokens_to_one_expert(strategy, dtype, tokens):
    experts, tensors = draw(fresh_generator(), tokens, top_k=1, dtype=dtype)
    experts = torch.full_like(experts, 3)
    check(strategy, experts, tensors)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_without_tokens_the_weights_get_zeros(strategy):
    experts, tensors = draw(fresh_generator(), tokens=0)
    leaves = [t.requires_grad_() for t in tensors]
    out = run(strategy, experts, leaves, "silu", True)
    assert out.shape == (0, 24)
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_strides_and_leading_axes(strategy):
    generator = fresh_generator()
    experts, (x, weights, *rest) = draw(generator, tokens=12)
    expected = run(strategy, experts, (x, weights, *rest), "silu", True)
    wide = torch.randn(12, 50, generator=generator)
    wide[:, 10:34] = x
    up, down = (
        rest[0].transpose(1, 2).contiguous().transpose(1, 2),
        rest[1].transpose(0, 2).contiguous().transpose(0, 2),
    )
    strided = (wide[:, 10:34], weights.t().contiguous().t(), up, down, *rest[2:])
    torch.testing.assert_close(run(strategy, experts, strided, "silu", True), expected)
    shaped = (x.reshape(3, 4, 24), weights.reshape(3, 4, 2), *rest)
    shaped_out = run(strategy, experts.int().reshape(3, 4, 2), shaped, "silu", True)
    torch.testing.assert_close(shaped_out, expected.reshape(3, 4, 24))
    expanded = (x[:1].expand(12, 24), weights, *rest)
    copied = (x[:1].repeat(12, 1), weights, *rest)
    torch.testing.assert_close(
        run(strategy, experts, expanded, "silu", True), run(strategy, experts, copied, "silu", True)
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_on_every_run(strategy, dtype):
    experts, tensors = draw(fresh_generator(), tokens=200, hidden=64, width=48, num_experts=4, dtype=dtype)
    results = []
    for _ in range(3):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = run(strategy, experts, leaves, "silu", True)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s.value != "cpu"], ids=str)
def test_gradcheck(strategy):
    experts, tensors = draw(fresh_generator(), tokens=4, hidden=3, width=2, num_experts=3)
    leaves = [t.double().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: run(strategy, experts, t, "silu", True), leaves)


def test_float32_activations_with_half_precision_weights():
    experts, tensors = draw(fresh_generator(), tokens=40, hidden=64, width=48)
    half = [tensors[0], tensors[1], *(t.bfloat16() for t in tensors[2:])]
    golden = moe_reference(half[0].double(), experts, *(t.double() for t in half[1:]), "silu", True)
    for strategy in STRATEGIES:
        assert_parity(run(strategy, experts, half, "silu", True), golden, reduction=64, what=str(strategy))


def test_the_native_op_passes_opcheck():
    experts, tensors = draw(fresh_generator())
    leaves = [t.requires_grad_() for t in tensors]
    arguments = (leaves[0], experts, *leaves[1:], "silu", True, True)
    torch.library.opcheck(torch.ops.atb_modules.moe.default, arguments)


def test_compiles_without_a_break():
    experts, tensors = draw(fresh_generator())
    leaves = [t.requires_grad_() for t in tensors]
    compiled = torch.compile(lambda e, *t: run("auto", e, t, "silu", True), fullgraph=True, backend="aot_eager")
    out, expected = compiled(experts, *leaves), run("auto", experts, leaves, "silu", True)
    torch.testing.assert_close(out, expected)
    for mine, truth in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, truth)
    with pytest.raises(Exception, match="cannot trace products whose sizes depend on the routing"):
        torch.compile(lambda e, *t: run("torch", e, t, "silu", True), fullgraph=True)(experts, *tensors)


def test_grouped_products_are_the_same(monkeypatch):
    """What runs on CUDA in bfloat16, by torch's own form of it on the CPU."""
    monkeypatch.setattr("atb_modules.kernels.torch.moe.has_grouped_products", lambda *_: True)
    for tokens, bias in ((40, True), (3, False)):
        experts, tensors = draw(fresh_generator(), tokens, hidden=24, width=16, num_experts=6, bias=bias)
        check(STRATEGIES[[s.value for s in STRATEGIES].index("torch")], experts, tensors)


def test_transforms_and_meta_tensors():
    experts, tensors = draw(fresh_generator(), bias=False)
    x, weights, up_proj, down_proj = tensors[:4]
    call = lambda x, e, w: ops.moe(x, e, w, up_proj, down_proj)  # noqa: E731
    parts = [t.unsqueeze(1) for t in (x, experts, weights)]
    torch.testing.assert_close(torch.func.vmap(call)(*parts).squeeze(1), call(x, experts, weights))
    direction = torch.randn_like(x)
    _, tangent = torch.func.jvp(lambda x: call(x, experts, weights), (x,), (direction,))
    gradient = torch.func.grad(lambda x: call(x, experts, weights).sum())(x)
    torch.testing.assert_close((gradient * direction).sum(), tangent.sum())
    moved = [t.to("meta") for t in (x, experts, weights, up_proj, down_proj)]
    assert ops.moe(*moved).shape == x.shape


def test_what_does_not_fit_is_refused():
    experts, (x, weights, up, down, up_bias, down_bias) = draw(fresh_generator())
    experts[0] = torch.tensor([0, 4])  # the words of a refusal name the smallest and the largest
    for call, error, message in (
        (lambda: ops.moe(x.long(), experts, weights, up, down), TypeError, "x is torch.int64"),
        (lambda: ops.moe(x, experts.float(), weights, up, down), TypeError, "experts is torch.float32; allowed"),
        (lambda: ops.moe(x, experts[:3], weights, up, down), ValueError, "experts has shape"),
        (lambda: ops.moe(x, experts, weights[:, :1], up, down), ValueError, "weights has shape"),
        (
            lambda: ops.moe(x, experts + 4, weights, up, down),
            ValueError,
            "experts has numbers from 4 to 8; up_proj has 5",
        ),
        (lambda: ops.moe(x, experts - 9, weights, up, down), ValueError, "experts has numbers from"),
        (lambda: ops.moe(x, experts, weights, up[0], down), ValueError, "up_proj has shape"),
        (lambda: ops.moe(x, experts, weights, up[..., :9], down), ValueError, "up_proj has shape .* x allows"),
        (lambda: ops.moe(x, experts, weights, up, down[..., :9]), ValueError, "down_proj has shape"),
        (lambda: ops.moe(x, experts, weights, up, down.half()), TypeError, "down_proj is torch.float16; up_proj is"),
        (lambda: ops.moe(x, experts, weights, up, down, up_bias=down_bias), ValueError, "up_bias has shape"),
        (lambda: ops.moe(x, experts, weights, up, down, kind="tanh"), ValueError, "kind is 'tanh'; allowed: silu"),
        (lambda: ops.moe(x, experts, weights, up, down.to("meta")), ValueError, "down_proj is on meta; x is on cpu"),
        (lambda: ops.moe(x, experts, weights, up, down, strategy="sdpa"), ValueError, "strategy is 'sdpa'"),
        (lambda: ops.moe(x.double(), experts, weights, up, down, strategy="cpu"), ValueError, "not torch.float64"),
    ):
        with pytest.raises(error, match=message):
            call()

"""The one-call decode layer against the layer's formula in float64, over its options, dtypes and batch sizes."""

import math

import pytest
import torch
import torch.nn.functional as F

from atb_modules.kernels.cpu import DecodeLayerPlan, DecodeSettings, DecodeWeights

HIDDEN, INTERMEDIATE, PAGE = 72, 104, 8
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def draw_weights(s, dtype, *, bias=False, sandwich=False, qk_norm=False, sinks=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
    parts = {
        "qkv": normal(width, HIDDEN) / HIDDEN**0.5,
        "o": normal(HIDDEN, s.num_heads * s.head_dim) / 8,
        "gate_up": normal(2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5,
        "down": normal(HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5,
    }
    parts = {name: matrix.to(dtype) for name, matrix in parts.items()}
    parts |= {"attn_norm": 1 + normal(HIDDEN) / 4, "mlp_norm": 1 + normal(HIDDEN) / 4}
    if bias:
        parts |= {f"{name}_bias": normal(parts[name].shape[0]) for name in ("qkv", "o", "gate_up", "down")}
    if sandwich:
        parts |= {"attn_post_norm": normal(HIDDEN), "mlp_post_norm": normal(HIDDEN)}
    if qk_norm:
        parts |= {"q_norm": normal(s.head_dim), "k_norm": normal(s.head_dim)}
    if sinks:
        parts["sinks"] = normal(s.num_heads)
    return DecodeWeights(**parts)


def norm(x, weight, s):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + s.eps) * (weight.double() + s.weight_offset)


def rotate(x, cos, sin, s):
    """x (batch, heads, head_dim)."""
    half = cos.shape[1]
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    out = x.clone()
    first = slice(0, 2 * half, 2) if s.interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if s.interleaved else slice(half, 2 * half)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def formula(hidden, w, s, cos, sin, past, page_dtype):
    """(new hidden, new k, new v); past is a list over rows of (k, v) float64 (length, kv_heads, head_dim)."""
    x = hidden.double()
    qkv = norm(x, w.attn_norm, s) @ w.qkv.double().T
    if w.qkv_bias is not None:
        qkv = qkv + w.qkv_bias.double()
    heads = qkv.view(len(x), -1, s.head_dim)
    q, k, v = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], 1)
    if w.q_norm is not None:
        q, k = norm(q, w.q_norm, s), norm(k, w.k_norm, s)
    q, k = rotate(q, cos, sin, s), rotate(k, cos, sin, s)
    rows = []
    for b, (past_k, past_v) in enumerate(past):
        keys = torch.cat([past_k, k[b : b + 1].to(page_dtype).double()])
        values = torch.cat([past_v, v[b : b + 1].to(page_dtype).double()])
        if s.left is not None:
            keys, values = keys[-s.left - 1 :], values[-s.left - 1 :]
        group = s.num_heads // s.num_kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        logits = torch.einsum("hd,khd->hk", q[b], keys) * (s.scale or s.head_dim**-0.5)
        if s.softcap:
            logits = s.softcap * torch.tanh(logits / s.softcap)
        if w.sinks is not None:
            logits = torch.cat([logits, w.sinks.double()[:, None]], 1)
        weights = logits.softmax(-1)[:, : len(keys)]
        rows.append(torch.einsum("hk,khd->hd", weights, values).flatten())
    y = torch.stack(rows) @ w.o.double().T + (0 if w.o_bias is None else w.o_bias.double())
    x = x + (y if w.attn_post_norm is None else norm(y, w.attn_post_norm, s))
    y = norm(x, w.mlp_norm, s) @ w.gate_up.double().T + (0 if w.gate_up_bias is None else w.gate_up_bias.double())
    gate, up = y.chunk(2, -1)
    y = (ACTIVATIONS[s.activation](gate) * up) @ w.down.double().T
    y = y + (0 if w.down_bias is None else w.down_bias.double())
    return x + (y if w.mlp_post_norm is None else norm(y, w.mlp_post_norm, s)), k, v


def run_case(s, dtype=torch.float32, page_dtype=torch.float32, past=(5, 20, 0), tolerance=2e-5, **options):
    weights = draw_weights(s, dtype, **options)
    g = torch.Generator().manual_seed(9)
    batch, blocks = len(past), -(-(max(past) + 1) // PAGE)
    shape = (batch * blocks + 1, s.num_kv_heads, PAGE, s.head_dim)
    k_pages, v_pages = torch.full(shape, math.nan, dtype=page_dtype), torch.full(shape, math.nan, dtype=page_dtype)
    table = torch.randperm(batch * blocks, generator=g).int().view(batch, blocks)
    rows = []
    for b, n in enumerate(past):
        k = torch.randn((n, s.num_kv_heads, s.head_dim), generator=g).to(page_dtype)
        v = torch.randn((n, s.num_kv_heads, s.head_dim), generator=g).to(page_dtype)
        for i in range(n):
            k_pages[table[b, i // PAGE], :, i % PAGE] = k[i]
            v_pages[table[b, i // PAGE], :, i % PAGE] = v[i]
        rows.append((k.double(), v.double()))
    slots = torch.tensor([int(table[b, n // PAGE]) * PAGE + n % PAGE for b, n in enumerate(past)])
    lengths = torch.tensor([n + 1 for n in past], dtype=torch.int32)
    angle = torch.rand((batch, s.rotary_dim // 2), generator=g) * 6
    hidden = torch.randn((batch, HIDDEN), generator=g)
    want, new_k, new_v = formula(hidden, weights, s, angle.cos(), angle.sin(), rows, page_dtype)
    plan = DecodeLayerPlan(weights, s, k_pages, v_pages, max_batch=batch)
    plan.run(hidden, angle.cos(), angle.sin(), slots, table, lengths)
    torch.testing.assert_close(hidden.double(), want, atol=tolerance, rtol=tolerance)
    flat_k = k_pages.transpose(1, 2).reshape(-1, s.num_kv_heads, s.head_dim)
    flat_v = v_pages.transpose(1, 2).reshape(-1, s.num_kv_heads, s.head_dim)
    step = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[page_dtype]
    torch.testing.assert_close(flat_k[slots].double(), new_k, atol=step, rtol=step)
    torch.testing.assert_close(flat_v[slots].double(), new_v, atol=step, rtol=step)
    return hidden


BASE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "rotary_dim": 16, "eps": 1e-5}


@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(isa, dtype, page_dtype):
    # A key that falls on the other side of a rounding step of the pages moves the result by that step.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[page_dtype]
    run_case(DecodeSettings(**BASE), dtype, page_dtype, tolerance=tolerance)


@pytest.mark.parametrize("past", [(0,), (3, 3), (40,) * 5, tuple(range(16))], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batches_and_threads(isa, past, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run_case(DecodeSettings(**BASE), past=past)
        run_case(DecodeSettings(**BASE), torch.bfloat16, past=past)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "settings,options",
    [
        ({}, {"bias": True}),
        ({"weight_offset": 1.0, "activation": "gelu_tanh"}, {"sandwich": True, "qk_norm": True}),
        ({"left": 7, "softcap": 3.0, "scale": 0.7}, {"sinks": True}),
        ({"interleaved": True, "rotary_dim": 8, "activation": "gelu"}, {}),
        ({"num_heads": 5, "num_kv_heads": 1, "head_dim": 20, "rotary_dim": 10, "activation": "relu2"}, {"bias": True}),
        ({"num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "rotary_dim": 0, "left": 0}, {"qk_norm": True}),
        ({"num_heads": 2, "num_kv_heads": 2, "head_dim": 96, "rotary_dim": 96}, {"sandwich": True, "bias": True}),
    ],
    ids=str,
)
def test_options(isa, settings, options):
    run_case(DecodeSettings(**(BASE | settings)), **options)


def test_repeats_bit_for_bit(isa):
    results = [run_case(DecodeSettings(**BASE), past=(30, 9)) for _ in range(5)]
    assert all(torch.equal(results[0], other) for other in results)


def test_bad_weights_are_named():
    s = DecodeSettings(**BASE)
    good = draw_weights(s, torch.float32)
    pages = torch.zeros(2, 2, PAGE, 16), torch.zeros(2, 2, PAGE, 16)
    with pytest.raises(ValueError, match="down must have the shape"):
        DecodeLayerPlan(DecodeWeights(**(vars(good) | {"down": torch.zeros(HIDDEN + 1, INTERMEDIATE)})), s, *pages)
    with pytest.raises(TypeError, match="o must have the dtype torch.float32"):
        DecodeLayerPlan(DecodeWeights(**(vars(good) | {"o": good.o.double()})), s, *pages)
    with pytest.raises(TypeError, match="mlp_norm must be contiguous float32"):
        DecodeLayerPlan(DecodeWeights(**(vars(good) | {"mlp_norm": good.mlp_norm.half()})), s, *pages)
    with pytest.raises(ValueError, match="k_pages must have the shape"):
        DecodeLayerPlan(good, s, torch.zeros(2, 3, PAGE, 16), torch.zeros(2, 3, PAGE, 16))
    with pytest.raises(ValueError, match="max_batch must be between 1 and 16, got 17"):
        DecodeLayerPlan(good, s, *pages, max_batch=17)

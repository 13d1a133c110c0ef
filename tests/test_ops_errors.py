"""The functions of ``ops`` refuse by the names of their own arguments, whatever they are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atb_modules import ops


def f(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


FLOAT8 = f(3, 4).to(torch.float8_e4m3fn)
SPARSE = f(3, 4).to_sparse()
Q = f(1, 2, 3, 4)


def refused(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.matmul(None, f(4, 6)), TypeError, "a is NoneType; allowed: a tensor"),
        (lambda: ops.matmul(f(3, 4), [[1.0]]), TypeError, "b is list; allowed: a tensor"),
        (lambda: ops.matmul(f(2, 3, 4), np.zeros((2, 4, 6))), TypeError, "b is ndarray"),
        (lambda: ops.matmul(f(3, 4), f(4)), ValueError, r"a has shape \(3, 4\) and b \(4,\); allowed: at least 1"),
        (lambda: ops.matmul(f(), f(4, 6)), ValueError, r"a has shape \(\)"),
        (lambda: ops.matmul(f(3, 5), f(4, 6)), ValueError, r"a has shape \(3, 5\), 5 features; b of shape \(4, 6\)"),
        (lambda: ops.matmul(f(3, 4), f(4, 6), True), ValueError, r"b of shape \(4, 6\) takes 6"),
        (lambda: ops.matmul(f(2, 3, 5), f(2, 4, 6)), ValueError, r"a has shape \(2, 3, 5\), 5 features; b .* takes 4"),
        (lambda: ops.matmul(f(2, 3, 4), f(3, 4, 6)), ValueError, r"b \(3, 4, 6\); their leading axes must broadcast"),
        (lambda: ops.matmul(f(2, 3, 4), f(2, 4, 6, dtype=torch.float64)), TypeError, "b is torch.float64; a is"),
        (
            lambda: ops.matmul(f(2, 3, 4), f(2, 4, 6, dtype=torch.int64)),
            TypeError,
            "b is torch.int64; allowed: a float",
        ),
        (lambda: ops.matmul(f(2, 3, 4).int(), f(2, 4, 6).int()), TypeError, "a is torch.int32; allowed: a floating"),
        (lambda: ops.matmul(f(3, 4), f(4, 4), "yes"), TypeError, "trans_b is 'yes'"),
        (lambda: ops.matmul(f(3, 4), f(4, 4), 1), TypeError, "trans_b is 1"),
        (lambda: ops.matmul(f(2, 3, 4), f(2, 4, 6), bias=f(7, 2, 3, 6)), ValueError, "bias has shape .* broadcast to"),
        (lambda: ops.matmul(f(2, 3, 4), f(2, 4, 6), bias=f(5)), ValueError, r"bias has shape \(5,\)"),
        (lambda: ops.matmul(f(2, 3, 4), f(1, 4, 6), bias=f(3, 3, 6)), ValueError, r"bias has shape \(3, 3, 6\)"),
        (lambda: ops.matmul(f(2, 3, 4), f(2, 4, 6), bias=1.5), TypeError, "bias is float; allowed: a tensor or None"),
        (lambda: ops.matmul(f(3, 4), f(4, 6), bias=f(4)), ValueError, r"bias has shape \(4,\); allowed: \(6,\)"),
        (lambda: ops.matmul(f(2, 3, 4), f(2, 4, 6, device="meta")), ValueError, "b is on meta; a is on cpu"),
        (lambda: ops.matmul(f(2, 3, 4), f(2, 4, 6), bias=f(6, device="meta")), ValueError, "bias is on meta"),
        (lambda: ops.matmul(FLOAT8, f(4, 6)), TypeError, "a is torch.float8_e4m3fn; allowed: a floating dtype"),
        (lambda: ops.matmul(f(2, 3), SPARSE), TypeError, "b is a tensor of layout torch.sparse_coo; allowed: a dense"),
    ],
)
def test_matmul(call, error, message):
    refused(call, error, message)


def test_products_that_are_defined():
    a, b = torch.randn(2, 3, 4), torch.randn(5, 1, 4, 6)
    assert ops.matmul(a, b, bias=f(6)).shape == (5, 2, 3, 6)
    torch.testing.assert_close(ops.matmul(a, b, bias=f(3, 1)), a @ b + 1)
    torch.testing.assert_close(ops.matmul(a[0, 0], b), a[0, 0] @ b)
    torch.testing.assert_close(ops.matmul(a[0], b.mT, True), a[0] @ b)
    half = ops.matmul(a.bfloat16(), b.bfloat16(), bias=f(6))
    assert half.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.matmul(a, b.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("function", [ops.fused_layernorm_matmul, ops.fused_rmsnorm_matmul])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None, f(4, 6)), {}, TypeError, "x is NoneType"),
        ((f(3, 4), None), {}, TypeError, "w is NoneType"),
        ((f(3, 4), "w"), {}, TypeError, "w is str"),
        ((f(3, 4), f(6, 4)), {}, ValueError, r"x has shape \(3, 4\), 4 features; w of shape \(6, 4\) takes 6"),
        ((f(3, 4), f(4)), {}, ValueError, r"w \(4,\)"),
        ((f(3, 4), f(4, 6).long()), {}, TypeError, "w is torch.int64"),
        ((f(3, 4), f(4, 6), f(4)), {}, ValueError, r"bias has shape \(4,\); allowed: \(6,\), the columns of w"),
        ((f(3, 4), f(4, 6, device="meta")), {}, ValueError, "w is on meta; x is on cpu"),
        ((f(3, 4), f(4, 6)), {"norm_weight": f(6)}, ValueError, r"norm_weight has shape \(6,\); x of width 4"),
        ((f(3, 4), f(4, 6)), {"norm_weight": 1.0}, TypeError, "norm_weight is float; allowed: a tensor or None"),
        ((f(3, 4), f(4, 6)), {"norm_weight": f(4, device="meta")}, ValueError, "norm_weight is on meta"),
        ((f(3, 4), f(4, 6)), {"eps": "x"}, TypeError, "eps is 'x'"),
        ((SPARSE, f(4, 6)), {}, TypeError, "x is a tensor of layout"),
    ],
)
def test_norms_before_products(function, arguments, options, error, message):
    refused(lambda: function(*arguments, **options), error, message)


def test_the_bias_of_a_layer_norm_before_a_product():
    refused(lambda: ops.fused_layernorm_matmul(f(3, 4), f(4, 6), norm_bias=f(6)), ValueError, "norm_bias has shape")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.silu_matmul(None, f(4, 6)), TypeError, "x is NoneType"),
        (lambda: ops.silu_matmul(f(3, 4), 2), TypeError, "w is int"),
        (lambda: ops.silu_matmul(f(3, 4), f(6, 4)), ValueError, "w of shape"),
        (
            lambda: ops.silu_matmul(f(3, 4), f(4, 6), gate=f(3, 5)),
            ValueError,
            r"gate has shape \(3, 5\); x has \(3, 4\)",
        ),
        (lambda: ops.silu_matmul(f(3, 4), f(4, 6), gate=1), TypeError, "gate is int"),
        (lambda: ops.silu_matmul(f(3, 4), f(4, 6), gate=f(3, 4).double()), TypeError, "gate is torch.float64; x is"),
        (lambda: ops.fused_mlp(None, f(4, 6), f(4, 6), f(6, 4)), TypeError, "x is NoneType"),
        (lambda: ops.fused_mlp(f(3, 4), 1, f(4, 6), f(6, 4)), TypeError, "gate_w is int"),
        (lambda: ops.fused_mlp(f(3, 4), f(4, 6), None, f(6, 4)), TypeError, "up_w is NoneType"),
        (lambda: ops.fused_mlp(f(3, 4), f(4, 6), f(4, 6), None), TypeError, "down_w is NoneType"),
        (lambda: ops.fused_mlp(f(3, 4), f(6, 4), f(4, 6), f(6, 4)), ValueError, r"gate_w of shape \(6, 4\) takes 6"),
        (lambda: ops.fused_mlp(f(3, 4), f(4, 5), f(4, 6), f(6, 4)), ValueError, r"gate_w has shape \(4, 5\); up_w has"),
        (lambda: ops.fused_mlp(f(3, 4), f(4, 6), f(6, 4), f(6, 4)), ValueError, r"up_w of shape \(6, 4\) takes 6"),
        (lambda: ops.fused_mlp(f(3, 4), f(4, 6), f(4, 6), f(4, 6)), ValueError, r"down_w of shape \(4, 6\) takes 4"),
        (lambda: ops.fused_mlp(f(3, 4), f(4, 6), f(4, 6), f(6)), ValueError, r"down_w \(6,\)"),
        (lambda: ops.fused_mlp(f(3, 4), f(4, 6), f(4, 6), f(6, 4), kind="x"), ValueError, "kind is 'x'"),
        (lambda: ops.split_heads(None, 2), TypeError, "qkv is NoneType"),
        (lambda: ops.split_heads(f(1, 2, 12), None), TypeError, "num_heads is None"),
        (lambda: ops.split_heads(f(1, 2, 12), "2"), TypeError, "num_heads is '2'"),
        (lambda: ops.split_heads(f(1, 2, 12), torch.tensor(2)), TypeError, "num_heads is tensor"),
        (lambda: ops.split_heads(f(1, 2, 12), 0), ValueError, "num_heads is 0"),
        (lambda: ops.split_heads(f(1, 2, 12), 4, num_kv_heads=-2), ValueError, "num_kv_heads is -2"),
        (lambda: ops.split_heads(f(1, 2, 14), 3, num_kv_heads=2), ValueError, "num_kv_heads is 2; allowed: a divisor"),
        (lambda: ops.split_heads(f(1, 2, 0), 2), ValueError, "qkv has shape"),
        (lambda: ops.merge_heads(None, 2), TypeError, "x is NoneType"),
        (lambda: ops.merge_heads(Q, None), TypeError, "num_heads is None"),
        (lambda: ops.merge_heads(Q, "2"), TypeError, "num_heads is '2'"),
        (lambda: ops.merge_heads(Q, torch.tensor(2)), TypeError, "num_heads is tensor"),
        (lambda: ops.softmax([1.0]), TypeError, "x is list"),
        (lambda: ops.softmax(f(3).long()), TypeError, "x is torch.int64; allowed: a floating dtype"),
        (lambda: ops.softmax(f(3).bool()), TypeError, "x is torch.bool"),
        (lambda: ops.softmax(FLOAT8), TypeError, "x is torch.float8"),
        (lambda: ops.softmax(f(3, 4), 5), ValueError, "axis is 5; allowed: an int of at least -2 up to 1"),
        (lambda: ops.softmax(f(3, 4), -3), ValueError, "axis is -3"),
        (lambda: ops.softmax(f(3, 4), "x"), TypeError, "axis is 'x'"),
        (lambda: ops.softmax(f(3, 4), None), TypeError, "axis is None"),
        (lambda: ops.fused_attention(Q, None, Q, k_layout="bhds"), TypeError, "k is NoneType"),
        (lambda: ops.fused_attention(Q, f(4), Q, k_layout="bhds"), ValueError, r"k has shape \(4,\); k_layout 'bhds'"),
        (lambda: ops.fused_attention(Q, None, Q), TypeError, "k is NoneType"),
        (lambda: ops.fused_attention(Q, Q, Q, inv_scale="x"), TypeError, "inv_scale is 'x'"),
        (lambda: ops.fused_attention(Q, Q, Q, inv_scale=5e-324), ValueError, "inv_scale is 5e-324"),
        (lambda: ops.fused_attention(Q, Q, Q, inv_scale=float("nan")), ValueError, "inv_scale is nan"),
        (lambda: ops.rms_norm(f(3, 4), cast_first="x"), TypeError, "cast_first is 'x'"),
        (lambda: ops.rms_norm(f(3, 4), cast_first=1), TypeError, "cast_first is 1"),
        (lambda: ops.add_rms_norm(f(3, 4), f(3, 4), cast_first="x"), TypeError, "cast_first is 'x'"),
        (lambda: ops.add_rms_norm(f(3, 4), f(3, 4), overwrite=1), TypeError, "overwrite is 1"),
        (lambda: ops.add_rms_norm(f(3, 4), None), TypeError, "residual is NoneType"),
        (lambda: ops.gated_activation(f(3, 4), f(3, 4), overwrite="x"), TypeError, "overwrite is 'x'"),
        (lambda: ops.rotary(f(3, 1, 4), f(3, 2), f(3, 2), overwrite=None), TypeError, "overwrite is None"),
        (lambda: ops.rms_norm(FLOAT8), TypeError, "x is torch.float8_e4m3fn; allowed: a floating dtype"),
        (lambda: ops.layer_norm(SPARSE), TypeError, "x is a tensor of layout torch.sparse_coo"),
        (lambda: ops.rms_norm(f(3, 4), f(4).to_sparse()), TypeError, "weight is a tensor of layout"),
        (lambda: ops.add_layer_norm(f(3, 4), SPARSE), TypeError, "residual is a tensor of layout"),
        (lambda: ops.activation(FLOAT8, "silu"), TypeError, "x is torch.float8"),
        (lambda: ops.gated_activation(FLOAT8, FLOAT8), TypeError, "gate is torch.float8"),
        (lambda: ops.gated_activation(f(3, 4), SPARSE), TypeError, "up is a tensor of layout"),
        (lambda: ops.linear(SPARSE, f(6, 4)), TypeError, "x is a tensor of layout"),
        (lambda: ops.linear(f(3, 4), FLOAT8), TypeError, "weight is torch.float8"),
        (lambda: ops.rotary(FLOAT8.view(3, 1, 4), f(3, 2), f(3, 2)), TypeError, "x is torch.float8"),
    ],
)
def test_functions(call, error, message):
    refused(call, error, message)


def test_softmax_of_one_number():
    assert ops.softmax(torch.tensor(3.0)) == 1 and ops.softmax(torch.tensor(3.0), 0) == 1

"""Linear: bad sizes and bad tensors are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atb_modules import Attention, Linear
from atb_modules.ops import linear

X, W, B = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.numpy(), W), TypeError, "x is ndarray; allowed: a tensor"),
        ((X, W.tolist()), TypeError, "weight is list"),
        ((X.long(), W), TypeError, "x is torch.int64; allowed: a floating dtype"),
        ((X, W[0]), ValueError, r"weight \(4,\); allowed: .*\(out_features, in_features\)"),
        ((torch.tensor(1.0), W), ValueError, r"x has shape \(\)"),
        ((X, W, True), TypeError, "bias is bool; allowed: a tensor or None"),
        ((X, W, np.zeros(3)), TypeError, "bias is ndarray"),
        ((X, W, B[:2]), ValueError, "bias has shape"),
        ((X, W, B.to("meta")), ValueError, "bias is on meta; x is on cpu"),
        ((X, W, B.long()), TypeError, "bias is torch.int64; allowed: a floating dtype"),
    ],
)
def test_products_refuse(arguments, error, message):
    with pytest.raises(error, match=message):
        linear(*arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 4), {}, ValueError, "in_features is 0; allowed: a positive int"),
        ((4, -1), {}, ValueError, "out_features is -1"),
        ((4.0, 4), {}, TypeError, "in_features is 4.0"),
        ((4, True), {}, TypeError, "out_features is True"),
        ((4, 4, "yes"), {}, TypeError, "bias is 'yes'"),
        ((4, 4), {"strategy": 3}, ValueError, "strategy is 3"),
        ((4, 4), {"dtype": torch.int64}, ValueError, "dtype is torch.int64; allowed: a floating"),
        ((4, 4), {"dtype": "bfloat16"}, TypeError, "dtype is 'bfloat16'"),
    ],
)
def test_modules_refuse(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Linear(*arguments, **options)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1.0], TypeError, "qkv.k_proj.weight is list; allowed: a tensor"),
        (torch.tensor(1.0), ValueError, "qkv.k_proj.weight has no axis"),
    ],
)
def test_parts_that_are_fused_on_load_are_tensors(value, error, message):
    weight = torch.zeros(32, 32)
    state = {f"qkv.{part}_proj.weight": weight for part in "qv"} | {"qkv.k_proj.weight": value, "o_proj.weight": weight}
    with pytest.raises(error, match=message):
        Attention(32, 4).load_state_dict(state)

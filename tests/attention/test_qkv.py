"""Fused projections: heads and layouts that do not go together are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atb_modules import convert_qkv_weight, convert_rotary_weight
from atb_modules.attention import split_qkv

QKV = torch.zeros(2, 96)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((QKV.numpy(), 4, 4, 8), TypeError, "qkv is ndarray"),
        ((torch.tensor(1.0), 4, 4, 8), ValueError, "qkv has no axis"),
        ((QKV, 4, 0, 8, "grouped"), ValueError, "num_kv_heads is 0"),
        ((QKV, 4, 3, 8, "grouped"), ValueError, "num_kv_heads is 3; allowed: a divisor of num_heads 4"),
        ((QKV, 4.0, 4, 8), TypeError, "num_heads is 4.0"),
        ((QKV, 4, 4, -8), ValueError, "head_dim is -8"),
        ((QKV, 4, 4, 9), ValueError, "qkv has 96 channels; 4 heads and twice 4 kv heads of 9 make 108"),
        ((QKV, 4, 2, 12, "per_head"), ValueError, "layout 'per_head' needs num_kv_heads 2 equal to num_heads 4"),
        ((QKV, 4, 4, 8, 3), ValueError, "layout is 3"),
    ],
)
def test_splits(arguments, error, message):
    with pytest.raises(error, match=message):
        split_qkv(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], 4, 4, 8, "qkv"), TypeError, "weight is list"),
        ((torch.zeros(1, 96, 4), 4, 4, 8, "qkv"), ValueError, "weight has shape"),
        ((torch.zeros(96, 4), 4, 4, 8, "gpt"), ValueError, "^source is 'gpt'"),
        ((torch.zeros(96, 4), 4, 4, 8, None), ValueError, "^source is None"),
        ((torch.zeros(64, 4), 4, 2, 8, "per_head"), ValueError, "^source 'per_head' needs num_kv_heads 2 equal"),
        ((torch.zeros(95, 4), 4, 4, 8, "qkv"), ValueError, "^weight has 95 output channels; 4 heads .* make 96"),
        ((torch.zeros(96, 4), 4, 4, 8.0, "qkv"), TypeError, "^head_dim is 8.0"),
    ],
)
def test_weights(arguments, error, message):
    with pytest.raises(error, match=message):
        convert_qkv_weight(*arguments)


@pytest.mark.parametrize(
    ("weight", "heads", "rotary_dim", "error", "message"),
    [
        (np.zeros((32, 4)), 4, None, TypeError, "weight is ndarray"),
        (torch.tensor(1.0), 4, None, ValueError, "weight has no axis"),
        (torch.zeros(32, 4), 0, None, ValueError, "num_heads is 0"),
        (torch.zeros(32, 4), 4.0, None, TypeError, "num_heads is 4.0"),
        (torch.zeros(32, 4), 5, None, ValueError, "32 rows, which num_heads 5 does not divide"),
        (torch.zeros(32, 4), 4, 3, ValueError, "rotary_dim is 3; allowed: an even number up to head_dim 8"),
        (torch.zeros(32, 4), 4, 10, ValueError, "rotary_dim is 10"),
        (torch.zeros(32, 4), 4, 0, ValueError, "rotary_dim is 0"),
        (torch.zeros(28, 4), 4, None, ValueError, "rotary_dim is 7"),
    ],
)
def test_rotary_weights(weight, heads, rotary_dim, error, message):
    with pytest.raises(error, match=message):
        convert_rotary_weight(weight, heads, "half", "interleaved", rotary_dim)

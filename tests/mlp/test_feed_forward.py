"""Feed-forwards: bad options and bad tensors are named."""

from __future__ import annotations

import pytest
import torch

from atb_modules import FeedForward, MLPConfig
from atb_modules.mlp import activation, gated_activation

NAN = float("nan")
X = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": "a"}, TypeError, r"dropout is 'a' \(str\); allowed: 0 <= dropout < 1"),
        ({"dropout": NAN}, ValueError, "dropout is nan"),
        ({"dropout": True}, TypeError, "dropout is True"),
        ({"dropout": -1}, ValueError, "dropout is -1"),
        ({"bias": None}, TypeError, "bias is None"),
        ({"bias": "no"}, TypeError, "bias is 'no'"),
        ({"strategy": None}, ValueError, "strategy is None"),
        ({"linear_strategy": "fast"}, ValueError, "linear_strategy is 'fast'"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        MLPConfig(**options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((4, 0), {}, ValueError, "intermediate_size is 0"),
        ((4, 8.0), {}, TypeError, "intermediate_size is 8.0"),
        ((True, 8), {}, TypeError, "hidden_size is True"),
        ((4, 8, None), {}, ValueError, "mlp_type is None"),
        ((4, 8), {"config": {"bias": True}}, TypeError, "config is .*allowed: MLPConfig or None"),
        ((4, 8), {"dtype": torch.int8}, ValueError, "dtype is torch.int8"),
    ],
)
def test_bad_modules(arguments, options, error, message):
    with pytest.raises(error, match=message):
        FeedForward(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gated_activation(X.numpy(), X), TypeError, "gate is ndarray; allowed: a tensor"),
        (lambda: gated_activation(X, [1.0]), TypeError, "up is list"),
        (lambda: gated_activation(X, X.to("meta")), ValueError, "gate is on cpu; up is on meta"),
        (lambda: gated_activation(X, X, None), ValueError, "kind is None"),
        (lambda: gated_activation(torch.tensor(1.0), torch.tensor(1.0)), ValueError, "gate has no axis"),
        (lambda: activation(X.numpy(), "silu"), TypeError, "x is ndarray"),
        (lambda: activation(X.long(), "silu"), TypeError, "x is torch.int64; allowed: a floating dtype"),
        (lambda: FeedForward(4, 8)(X.numpy()), TypeError, "x is ndarray"),
    ],
)
def test_functions_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()

"""Norms: bad options and bad tensors are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atb_modules import LayerNorm, NormConfig, RMSNorm
from atb_modules.norm import add_layer_norm, add_rms_norm, build_norm, layer_norm, rms_norm

NAN, INF = float("nan"), float("inf")
X, W = torch.randn(2, 4), torch.ones(4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eps": "a"}, TypeError, r"eps is 'a' \(str\); allowed: a finite number >= 0"),
        ({"eps": None}, TypeError, "eps is None"),
        ({"eps": True}, TypeError, "eps is True"),
        ({"eps": NAN}, ValueError, "eps is nan"),
        ({"eps": INF}, ValueError, "eps is inf"),
        ({"eps": -1e-6}, ValueError, "eps is -1e-06"),
        ({"weight_offset": "1"}, TypeError, "weight_offset is '1'"),
        ({"weight_offset": NAN}, ValueError, "weight_offset is nan"),
        ({"cast_order": "first"}, ValueError, "cast_order is 'first'"),
        ({"cast_order": None}, ValueError, "cast_order is None"),
        ({"bias": 1}, TypeError, "bias is 1"),
        ({"elementwise_affine": "no"}, TypeError, "elementwise_affine is 'no'"),
        ({"strategy": "fast"}, ValueError, "strategy is 'fast'"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        NormConfig(**options)


def test_whole_numbers_are_floats():
    assert NormConfig(eps=0, weight_offset=1) == NormConfig(eps=0.0, weight_offset=1.0)
    assert torch.equal(rms_norm(X, W, 0, weight_offset=1), rms_norm(X, W, 0.0, weight_offset=1.0))


@pytest.mark.parametrize("build", [RMSNorm, LayerNorm])
@pytest.mark.parametrize(
    ("size", "options", "error", "message"),
    [
        (0, {}, ValueError, "hidden_size is 0"),
        (True, {}, TypeError, "hidden_size is True"),
        (4.0, {}, TypeError, "hidden_size is 4.0"),
        (4, {"dtype": torch.int32}, ValueError, "dtype is torch.int32"),
        (4, {"elementwise_affine": 1}, TypeError, "elementwise_affine is 1"),
        (4, {"eps": "small"}, TypeError, "eps is 'small'"),
    ],
)
def test_bad_modules(build, size, options, error, message):
    with pytest.raises(error, match=message):
        build(size, **options)


def test_build_norm_takes_a_config():
    with pytest.raises(TypeError, match="config is .*allowed: NormConfig"):
        build_norm("rmsnorm", 4, {"eps": 1e-6})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rms_norm(X.numpy(), W), TypeError, "x is ndarray; allowed: a floating tensor"),
        (lambda: rms_norm(X, [1.0] * 4), TypeError, "weight is list; allowed: a floating tensor or None"),
        (lambda: rms_norm(X, W.long()), TypeError, "weight is torch.int64; allowed: a floating dtype"),
        (lambda: rms_norm(X, W, "a"), TypeError, "eps is 'a'"),
        (lambda: rms_norm(X, W, NAN), ValueError, "eps is nan"),
        (lambda: rms_norm(X, W, -1.0), ValueError, "eps is -1.0"),
        (lambda: rms_norm(X, W, weight_offset="1"), TypeError, "weight_offset is '1'"),
        (lambda: rms_norm(X, W, weight_offset=INF), ValueError, "weight_offset is inf"),
        (lambda: layer_norm(X, W, np.zeros(4)), TypeError, "bias is ndarray"),
        (lambda: layer_norm(X, W, None, INF), ValueError, "eps is inf"),
        (lambda: add_rms_norm(X, X.numpy(), W), TypeError, "residual is ndarray; allowed: a floating tensor"),
        (lambda: add_rms_norm(None, X, W), TypeError, "x is NoneType; allowed: a floating tensor"),
        (lambda: add_rms_norm(X, X.to("meta"), W), ValueError, "residual is on meta; x is on cpu"),
        (lambda: add_layer_norm(X, X[:1], W), ValueError, "residual has shape"),
        (lambda: add_layer_norm(X, X, W, None, None), TypeError, "eps is None"),
    ],
)
def test_functions_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()

"""Residual branches: bad options are named."""

from __future__ import annotations

import pytest
import torch

from atb_modules.residual import ResidualBranch, ResidualConfig

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", ["dropout", "drop_path"])
@pytest.mark.parametrize(
    ("value", "error"),
    [("a", TypeError), (None, TypeError), (True, TypeError), (NAN, ValueError), (-0.1, ValueError), (1.0, ValueError)],
)
def test_shares_are_numbers_below_one(name, value, error):
    with pytest.raises(error, match=f"{name} is .*allowed: 0 <= {name} < 1"):
        ResidualConfig(**{name: value})


@pytest.mark.parametrize(
    ("value", "error"), [("a", TypeError), (True, TypeError), (NAN, ValueError), (INF, ValueError)]
)
def test_layer_scale_is_a_finite_number(value, error):
    with pytest.raises(error, match="layer_scale is .*allowed: a finite number, or None"):
        ResidualConfig(layer_scale=value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, ResidualConfig()), ValueError, "hidden_size is 0"),
        ((4.0, ResidualConfig()), TypeError, "hidden_size is 4.0"),
        ((4, {"dropout": 0.1}), TypeError, "config is .*allowed: ResidualConfig"),
        ((4, ResidualConfig(layer_scale=0.1), None, torch.int8), ValueError, "dtype is torch.int8"),
    ],
)
def test_bad_branches(arguments, error, message):
    with pytest.raises(error, match=message):
        ResidualBranch(*arguments)

"""The checks at the edge: what each lets through, and what it says of the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atb_modules import Attention, KVCacheManager, LayerNorm, Linear, RMSNorm
from atb_modules.checks import (
    check_bool,
    check_device,
    check_int,
    check_number,
    check_parameter_dtype,
    check_positive,
    check_probability,
    check_tensor,
    check_type,
    numbers,
)

NAN, INF, HUGE = float("nan"), float("inf"), 10**400


def test_what_passes():
    check_int("n", 1)
    check_int("n", 0, least=0)
    check_int("n", None, optional=True)
    check_number("x", -3)
    check_number("x", np.float64(0.5))
    check_positive("x", 1e-300)
    check_probability("p", 0)
    check_bool("flag", False)
    check_bool("flag", None, optional=True)
    check_type("s", None, str, optional=True)
    check_parameter_dtype(None)
    check_parameter_dtype(torch.float64)
    assert numbers("xs", [1, 2.5]) == (1, 2.5)
    assert numbers("xs", None, optional=True) is None


@pytest.mark.parametrize(
    ("check", "value", "error", "message"),
    [
        (check_int, True, TypeError, r"x is True \(bool\); allowed: a positive int"),
        (check_int, 2.0, TypeError, r"x is 2.0 \(float\)"),
        (check_int, None, TypeError, "x is None"),
        (check_int, np.int64(3), TypeError, "int64"),
        (check_int, 0, ValueError, "x is 0; allowed: a positive int"),
        (check_int, 2**31, ValueError, "x is 2147483648; allowed: a positive int up to 2147483647"),
        (check_number, "1", TypeError, r"x is '1' \(str\); allowed: a finite number"),
        (check_number, True, TypeError, "x is True"),
        (check_number, NAN, ValueError, "x is nan; allowed: a finite number"),
        (check_number, -INF, ValueError, "x is -inf"),
        (check_number, HUGE, ValueError, "x is 1000"),
        (check_positive, 0.0, ValueError, "x is 0.0; allowed: a positive number"),
        (check_positive, torch.tensor(1.0), TypeError, "x is tensor"),
        (check_probability, 1.0, ValueError, "x is 1.0; allowed: 0 <= x < 1"),
        (check_probability, NAN, ValueError, "x is nan"),
        (check_bool, 1, TypeError, r"x is 1 \(int\); allowed: True, False"),
        (check_bool, None, TypeError, "x is None"),
        (check_tensor, np.zeros(2), TypeError, "x is ndarray; allowed: a tensor"),
        (numbers, "12", TypeError, "x is '12'"),
        (numbers, {1.0}, TypeError, "allowed: a list or tuple of positive numbers"),
        (numbers, [1.0, 0.0], ValueError, r"x\[1\] is 0.0; allowed: a positive number"),
        (numbers, [INF], ValueError, r"x\[0\] is inf"),
        (numbers, ["a"], TypeError, r"x\[0\] is 'a'"),
    ],
)
def test_what_does_not(check, value, error, message):
    with pytest.raises(error, match=message):
        check("x", value)


def test_types_and_dtypes_are_named():
    with pytest.raises(TypeError, match=r"x is 3 \(int\); allowed: str or None"):
        check_type("x", 3, str, optional=True)
    with pytest.raises(TypeError, match="dtype is 'float32'"):
        check_parameter_dtype("float32")
    with pytest.raises(ValueError, match="dtype is torch.int8; allowed: a floating torch.dtype or None"):
        check_parameter_dtype(torch.int8)


def test_devices_are_named():
    for good in (None, "cpu", torch.device("meta"), 0):
        check_device(good)
    with pytest.raises(TypeError, match=r"device is 1.5 \(float\); allowed: a torch.device, its name, or None"):
        check_device(1.5)
    for build in (
        lambda: check_device("nope"),
        lambda: Linear(4, 4, device="nope"),
        lambda: RMSNorm(4, device="nope"),
        lambda: LayerNorm(4, device="nope"),
        lambda: Attention(32, 4, device="nope"),
        lambda: KVCacheManager(32, 4, 1, 4, 8, torch.float32, device="nope"),
    ):
        with pytest.raises(ValueError, match="device is 'nope'; allowed: a torch.device, its name, or None"):
            build()

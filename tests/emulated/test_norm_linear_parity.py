"""The parity tests of a norm with its product on the emulated NPU."""

import pytest

from atb_modules import norm_linear

from .borrowed import borrow, on_npu, parity_tests

_MODULE = borrow("test_norm_linear.py", ())
_MODULE.norm_linear = on_npu(norm_linear.norm_linear)
globals().update(parity_tests(_MODULE, without=("test_refusals",)))


@pytest.fixture(autouse=True)
def emulated(npu):
    """Every test here computes on the emulated NPU."""

"""The parity tests of norms, activations, rotations and cache writes on the emulated NPU."""

import pytest

from .borrowed import borrow, parity_tests

globals().update(parity_tests(borrow("kernels/test_elementwise_parity.py", ())))


@pytest.fixture(autouse=True)
def emulated(npu):
    """Every test here computes on the emulated NPU."""

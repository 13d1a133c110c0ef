"""The parity tests of packed sequences, images, live blocks and prefixes on the emulated NPU."""

import pytest

from .borrowed import borrow, parity_tests

globals().update(
    parity_tests(
        borrow("kernels/test_overlay_parity.py", ("attention",)),
        without=("test_gradcheck_in_float64",),  # NPUs do not compute in float64
    )
)


@pytest.fixture(autouse=True)
def emulated(npu):
    """Every test here computes on the emulated NPU."""

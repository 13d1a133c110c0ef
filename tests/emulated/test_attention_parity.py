"""The parity tests of attention, dense and with overlays, on the emulated NPU."""

import pytest

from .borrowed import borrow, parity_tests

globals().update(
    parity_tests(
        borrow("kernels/test_attention_parity.py", ("attention",)),
        without=("test_lse_is_differentiable_where_it_is_returned",),  # of the eager kernel in float64
    )
)


@pytest.fixture(autouse=True)
def emulated(npu):
    """Every test here computes on the emulated NPU."""

"""Every test of the CPU kernels runs once for each instruction set of this machine."""

import pytest

from atb_modules.kernels.cpu import library


@pytest.fixture(params=library.available_isas() or ("missing",))
def isa(request):
    """Forces one instruction set for the duration of a test."""
    assert request.param != "missing", library.unavailable_reason()
    with library.use_isa(request.param):
        yield request.param

"""The parity harness itself: it accepts rounding, and turns red for every kind of fault."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing import assert_parity, compare, poisoned_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_alone_passes(dtype):
    golden = torch.randn(64, 64, dtype=torch.float64)
    result = compare(golden.to(dtype), golden, golden.to(dtype))
    assert result.ok and result.max_error > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fault", ["nan", "inf", "scale", "zero", "one_wrong"])
def test_faults_fail(dtype, fault):
    golden = torch.randn(64, 64, dtype=torch.float64)
    bad = golden.to(dtype)
    if fault == "nan":
        bad[3, 3] = float("nan")
    elif fault == "inf":
        bad[3, 3] = float("inf")
    elif fault == "scale":
        bad = bad * 1.05
    elif fault == "zero":
        bad = torch.zeros_like(bad)
    else:
        bad[3, 3] += 0.5
    with pytest.raises(AssertionError, match="thing: "):
        assert_parity(bad, golden, golden.to(dtype), what="thing")


def test_twice_the_plain_error_is_the_bound():
    golden = torch.ones(100, dtype=torch.float64)
    plain = (golden + 1e-5).float()
    assert compare((golden + 1.9e-5).float(), golden, plain).ok
    assert not compare((golden + 2.5e-5).float(), golden, plain).ok
    assert compare((golden + 2.5e-5).float(), golden, plain, softcap=True).ok


def test_equal_infinities_are_no_error_and_shapes_must_agree():
    minus = torch.full((2, 2), float("-inf"))
    assert compare(minus, minus.double()).ok
    assert compare(torch.empty(0, 3), torch.empty(0, 3).double()).ok
    with pytest.raises(ValueError, match="candidate has shape"):
        compare(torch.zeros(2), torch.zeros(3))


def test_poisoned_memory_is_nan_and_undone():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(8).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() is before

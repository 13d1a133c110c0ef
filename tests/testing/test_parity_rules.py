"""The parity harness itself: it accepts rounding, and turns red for every kind of fault."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atb_modules import AttentionSpec
from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.testing import assert_parity, compare, plain_attention, poisoned_memory, summation_orders


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


def test_the_plain_error_is_the_largest_over_the_evaluations_and_no_more_are_drawn_than_needed():
    golden = torch.ones(100, dtype=torch.float64)
    drawn = []

    def evaluations():
        for error in (1e-5, 3e-5, 2e-5):
            drawn.append(error)
            yield (golden + error).float()

    assert compare((golden + 5e-5).float(), golden, evaluations()).ok
    assert drawn == [1e-5, 3e-5]
    result = compare((golden + 9e-5).float(), golden, evaluations())
    assert not result.ok and abs(result.plain_error - 3e-5) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_every_summation_order_is_the_same_attention(causal):
    q, k, v = (torch.randn(2, heads, 9, 16, dtype=torch.float64) for heads in (4, 2, 2))
    extras = {"sinks": torch.randn(4).double(), "alibi_slopes": torch.rand(4).double()}
    spec = AttentionSpec(causal=causal, window=(4, 2))
    golden, _ = attention_reference(q, k, v, spec, **extras)
    orders = list(summation_orders(partial(plain_attention, q, k, v, spec, **extras), count=5))
    assert len(orders) == 6
    for out in orders:
        torch.testing.assert_close(out, golden, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_small_fault_fails_beside_sixty_four_orders(dtype):
    """One key in 64 left out of one row's softmax, or scores five times as coarse: no order errs by as much."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 64, 32, generator=generator).to(dtype) for _ in range(3))
    spec = AttentionSpec()
    golden, _ = attention_reference(q.double(), k.double(), v.double(), spec)
    plain = partial(plain_attention, q, k, v, spec)
    keep = torch.ones(64, 64, dtype=torch.bool)
    keep[5, k[0, 0].float().norm(dim=-1).argmin()] = False
    faulty = plain_attention(q, k, v, spec, mask=keep)
    assert not compare(faulty, golden, summation_orders(plain)).ok
    errors = [compare(out, golden, out).max_error for out in summation_orders(plain)]
    coarse = golden + 5.0 * torch.randn(golden.shape, generator=generator).clamp(-1, 1) * errors[0]
    assert not compare(coarse, golden, summation_orders(plain), dtype=dtype).ok
    assert max(errors) < 2.5 * errors[0]

"""The cost model as data: every kernel has a prediction, more work never costs less, and AUTO takes the least."""

from __future__ import annotations

import json

import pytest
import torch

from atb_modules.kernels import costs, half_units
from atb_modules.kernels.registry import explain_call, kernels
from atb_modules.ops import attention, gated_activation, layer_norm, linear, rms_norm
from atb_modules.spec import AttentionSpec

SPECS = [AttentionSpec(), AttentionSpec(causal=True), AttentionSpec(causal=True, window=(64, None), global_tokens=2)]


@pytest.mark.parametrize("kind", ["tiles", "dots", "plain"])
def test_the_rates_are_finite_and_belong_to_kernels(kind):
    stored = json.loads((costs.RATES / f"{kind}.json").read_text())
    assert len(stored) > 70
    for name, rates in stored.items():
        op, strategy, *_ = name.split("/")
        assert strategy in [kernel.strategy.value for kernel in kernels(op)], name
        assert len(rates) == 6 and all(0.0 <= rate < 1.0 for rate in rates) and any(rates), name


def test_every_kind_of_processor_knows_the_same_kernels(monkeypatch):
    tables = []
    for units, tiles in ((True, True), (True, False), (False, False)):
        monkeypatch.setattr(half_units, "BFLOAT16_UNITS", units)
        monkeypatch.setattr(half_units, "BFLOAT16_TILES", tiles)
        tables.append(costs._fitted())
    assert tables[0].keys() >= tables[1].keys() == tables[2].keys()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=["full", "causal", "global"])
def test_longer_calls_never_cost_less_and_auto_takes_the_least(spec, dtype, grad):
    before: dict[str, float] = {}
    for length in (1, 40, 300, 2000):
        q, k, v = (torch.empty(1, 4, length, 64, dtype=dtype, requires_grad=grad) for _ in range(3))
        table = explain_call(attention, q, k, v, spec)
        predicted = {row.strategy: row.predicted_seconds for row in table.rows if not row.reasons}
        assert table.chosen == min(predicted, key=lambda strategy: predicted[strategy])
        assert f"{predicted['cpu'] * 1e6:.1f} us predicted" in str(table) if "cpu" in predicted else True
        if length > 40:
            assert all(predicted[strategy] >= before.get(strategy, 0.0) for strategy in predicted)
        before = predicted


def test_a_kernel_without_rates_of_its_own_has_those_of_its_strategy():
    for op in ("cache_append", "paged_attention", "moe", "decode_layer"):
        for kernel in kernels(op):
            cost = costs.Cost(operations=1e6, bytes=1e6)
            where = kernel.device_types[0] if kernel.device_types else "cpu"
            fields = {"dtype": torch.float64, "requires_grad": False, "device_type": where}
            traits = type("Traits", (), fields)()
            assert 0.0 < costs.predicted_seconds(op, kernel.strategy.value, None, traits, cost) < 1.0


@pytest.mark.parametrize("masked", [False, True])
def test_torchs_fused_attention_in_bfloat16_is_fast_by_tiles_alone(masked, monkeypatch):
    """Measured: with AVX-512 BF16 alone it takes about the time of float32, with AMX far less."""

    def predicted(dtype, tiles):
        monkeypatch.setattr(half_units, "BFLOAT16_UNITS", True)
        monkeypatch.setattr(half_units, "BFLOAT16_TILES", tiles)
        monkeypatch.setattr(costs, "_FITTED", costs._fitted())
        q = torch.empty(1, 8, 1024, 128, dtype=dtype)
        mask = torch.ones(1024, 1024, dtype=torch.bool) if masked else None
        table = explain_call(attention, q, q, q, mask=mask)
        return next(row.predicted_seconds for row in table.rows if row.strategy == "sdpa")

    assert predicted(torch.bfloat16, True) < 0.7 * predicted(torch.float32, True)
    assert predicted(torch.bfloat16, False) > 0.7 * predicted(torch.float32, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_never_takes_the_oracle_of_a_tiny_call(dtype):
    x, weight = torch.randn(1, 8).to(dtype), torch.randn(8).to(dtype)
    q = torch.randn(1, 1, 1, 8).to(dtype)
    for call in (
        lambda: rms_norm(x, weight),
        lambda: layer_norm(x, weight, weight),
        lambda: gated_activation(x, x),
        lambda: linear(x, torch.randn(4, 8).to(dtype)),
        lambda: attention(q, q, q),
        lambda: attention(q, q, q, mask=torch.ones(1, 1, dtype=torch.bool)),
    ):
        assert explain_call(call).chosen not in ("reference", "flex")

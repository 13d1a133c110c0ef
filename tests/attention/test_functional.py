"""The functional attention ops: paged kernels over the registry, unwritten pages, and what is refused by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import AttentionSpec, KVCacheManager, ops
from atb_modules.kernels.reference.attention import attention_reference, paged_attention_reference
from atb_modules.ops import attention, cache_append, paged_attention
from atb_modules.testing import (
    assert_parity,
    fresh_generator,
    plain_paged_attention,
    poisoned_memory,
    summation_orders,
)
from atb_modules.testing.devices import strategies_under_test

STRATEGIES = strategies_under_test("attention")
PAGED = strategies_under_test("paged_attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def filled_cache(past, new, kv_heads, dim, page_size, dtype, generator, window=None):
    """A cache whose pages once held NaN, the step that brought ``new`` tokens, and its one layer's pages."""
    longest = max((a + b for a, b in zip(past, new, strict=True)), default=1)
    pages = sum(-(-(a + b) // page_size) for a, b in zip(past, new, strict=True)) + 1
    cache = KVCacheManager(longest + 1, page_size, 1, kv_heads, dim, dtype, num_pages=pages, window=window)
    for pool in cache.pages(0):
        pool.fill_(float("nan"))
    cache.begin(len(past))
    for lengths in (past, new):
        step = cache.step(lengths)
        k, v = torch.randn(2, sum(lengths), kv_heads, dim, generator=generator).to(dtype)
        cache_append(k, v, *cache.pages(0), step.slots(0))
    return cache, step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", PAGED, ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_paged_attention(strategy, dtype, data):
    """Ragged decode and prefill over pages of any size against the float64 reference (flash-attention #1745)."""
    generator = fresh_generator()
    rows = data.draw(st.integers(1, 4))
    past = data.draw(st.lists(st.integers(0, 70), min_size=rows, max_size=rows))
    new = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 9]), min_size=rows, max_size=rows))
    page_size = data.draw(st.sampled_from([1, 3, 16, 128]))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dim = data.draw(st.sampled_from([8, 20, 64, 80]))
    spec = AttentionSpec(
        causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([None, (5, 0), (40, 3)])),
        softcap=data.draw(st.sampled_from([None, 4.0])),
    )
    extras = {
        name: torch.randn(kv_heads * group, generator=generator) if data.draw(st.booleans()) else None
        for name in ("sinks", "alibi_slopes")
    }
    cache, step = filled_cache(past, new, kv_heads, dim, page_size, dtype, generator)
    q = torch.randn(sum(new), kv_heads * group, dim, generator=generator).to(dtype)
    where = (step.block_table(0), step.kv_lengths, step.cu_seqlens_q, spec)
    wide = {name: None if t is None else t.double() for name, t in extras.items()}
    golden, golden_lse = paged_attention_reference(q.double(), *(p.double() for p in cache.pages(0)), *where, **wide)
    plain = partial(plain_paged_attention, q, *cache.pages(0), *where, **extras)
    for need_lse in (False, True):
        try:
            with poisoned_memory():
                out, lse = paged_attention(q, *cache.pages(0), *where, **extras, return_lse=need_lse, strategy=strategy)
        except ValueError as refusal:
            assert "cannot serve this paged_attention call" in str(refusal)
            continue
        orders = summation_orders(plain)
        assert_parity(out, golden, orders, reduction=80, softcap=spec.softcap is not None, what=str(strategy))
        if lse is not None:
            tolerance = 5e-6 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(lse.double(), golden_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("strategy", PAGED, ids=str)
def test_pages_freed_behind_a_window_are_not_read(strategy):
    generator = fresh_generator()
    cache, step = filled_cache([0], [40], 2, 16, 4, torch.float32, generator, window=7)
    q = torch.randn(1, 2, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, 16, generator=generator)
    step = cache.step(1)
    cache_append(k, v, *cache.pages(0), step.slots(0))
    assert (step.block_table(0) < 0).any()
    for page in set(range(cache.pages(0)[0].shape[0])) - set(step.block_table(0).flatten().tolist()):
        for pool in cache.pages(0):
            pool[page] = float("nan")
    spec = AttentionSpec(causal=True, window=(7, None))
    where = (step.block_table(0), step.kv_lengths, step.cu_seqlens_q, spec)
    out, _ = paged_attention(q, *cache.pages(0), *where, strategy=strategy)
    keys, values = (t[:, -8:] for t in cache.gather(0, 0))
    golden, _ = attention_reference(q.transpose(0, 1)[None], keys[None], values[None], AttentionSpec())
    torch.testing.assert_close(out, golden[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strategy", PAGED, ids=str)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("table", [[10**6, 1]], "block_table\\[0\\] has \\[1000000, 1\\]"),
        ("table", [[-1, 1]], "block_table\\[0\\] has"),
        ("lengths", [10**8], "kv_lengths\\[0\\] is 100000000"),
        ("lengths", [-4], "kv_lengths\\[0\\] is -4"),
        ("starts", [0, 3_000_000], "cu_seqlens_q is"),
        ("starts", [1, 2], "cu_seqlens_q is"),
    ],
)
def test_addresses_are_checked(strategy, name, value, message):
    q, pages = torch.randn(2, 2, 8), torch.randn(4, 2, 4, 8)
    values = {"table": [[0, 1]], "lengths": [6], "starts": [0, 2]} | {name: value}
    where = [torch.tensor(values[key], dtype=torch.int32) for key in ("table", "lengths", "starts")]
    with pytest.raises(ValueError, match=message):
        paged_attention(q, pages, pages, *where, AttentionSpec(causal=True), strategy=strategy)


@pytest.mark.parametrize("strategy", ["cpu", "torch", "reference"])
def test_slots_are_checked(strategy):
    k, pages = torch.randn(3, 2, 8), torch.zeros(2, 4, 2, 4, 8)
    for slots in ([0, 1, 10**9], [0, 1, -2]):
        with pytest.raises(ValueError, match="slots go from"):
            cache_append(k, k, *pages, torch.tensor(slots), strategy=strategy)
    with pytest.raises(ValueError, match="slots is torch.int32"):
        cache_append(k, k, *pages, torch.zeros(3, dtype=torch.int32), strategy=strategy)
    with pytest.raises(ValueError, match="v is"):
        cache_append(k, k[:2], *pages, torch.arange(3), strategy=strategy)


def test_expanded_inputs_are_never_written_in_place():
    angles = torch.randn(3, 4)
    cos, sin = angles.cos(), angles.sin()
    gate, up = torch.randn(1, 8).expand(4, 8), torch.randn(4, 8)
    x = torch.randn(3, 1, 8).expand(3, 2, 8)
    with torch.no_grad():
        for call, one in ((ops.gated_activation, (gate, up)), (ops.rotary, (x, cos, sin))):
            before = one[0].clone()
            assert torch.equal(call(*one, overwrite=True), call(*one))
            assert torch.equal(one[0], before)
    pages = torch.zeros(2, 4, 2, 4, 8)
    with pytest.raises(ValueError, match="q is expanded"):
        ops.rotary_append(x, x, x, cos, sin, *pages, torch.arange(3), interleaved=False)


def valid():
    return {name: torch.randn(2, 4, 5, 8) for name in ("q", "k", "v")}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": torch.randn(2, 4, 6, 8)}, "v has 6 tokens; k has 5"),
        ({"k": torch.randn(2, 4, 1, 8), "v": torch.randn(2, 4, 4000, 8)}, "v has 4000 tokens; k has 1"),
        ({"k": torch.randn(2, 4, 5, 9)}, "k has head_dim 9; q has 8"),
        ({"k": torch.randn(2, 3, 5, 8), "v": torch.randn(2, 3, 5, 8)}, "q has 4 heads and k has 3"),
        ({"v": torch.randn(2, 2, 5, 8)}, "v has 2 heads; k has 4"),
        ({"k": torch.randn(3, 4, 5, 8), "v": torch.randn(3, 4, 5, 8)}, "q has 2, they must be equal"),
        ({"q": torch.randn(4, 5, 8)}, "q has shape"),
        ({"mask": torch.ones(2, 1, 5, 6, dtype=torch.bool)}, "mask has shape"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"alibi_slopes": torch.zeros(4, 1)}, "alibi_slopes has shape"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
    ],
)
def test_attention_refuses_values(strategy, changes, message):
    arguments = valid() | changes
    with pytest.raises(ValueError, match=message):
        attention(**arguments, strategy=strategy)


def test_attention_refuses_types():
    q = torch.randn(1, 1, 2, 8)
    with pytest.raises(TypeError, match="k is torch.float64; q is torch.float32"):
        attention(q, q.double(), q)
    with pytest.raises(TypeError, match="q is torch.int64"):
        attention(q.long(), q.long(), q.long())
    with pytest.raises(TypeError, match="mask is torch.int64"):
        attention(q, q, q, mask=torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="k is list"):
        attention(q, [1], q)
    with pytest.raises(TypeError):
        attention(q, q, q, sliding_window=4)
    with pytest.raises(ValueError, match="k is on meta; q is on cpu"):
        attention(q, q.to("meta"), q)


def test_paged_attention_refuses():
    cache, step = filled_cache([3], [1], 2, 8, 4, torch.float32, fresh_generator())
    q = torch.randn(1, 2, 8)
    where = [step.block_table(0), step.kv_lengths, step.cu_seqlens_q]
    with pytest.raises(ValueError, match="causal is 'top_left'"):
        paged_attention(q, *cache.pages(0), *where, AttentionSpec(causal="top_left"))
    with pytest.raises(ValueError, match="kv_lengths is torch.int64"):
        paged_attention(q, *cache.pages(0), where[0], where[1].long(), where[2], AttentionSpec())
    with pytest.raises(ValueError, match="q has 3 heads and k has 2"):
        paged_attention(torch.randn(1, 3, 8), *cache.pages(0), *where, AttentionSpec())
    with pytest.raises(ValueError, match="q's head_dim 9"):
        paged_attention(torch.randn(1, 2, 9), *cache.pages(0), *where, AttentionSpec())
    with pytest.raises(ValueError, match="k is"):
        cache_append(torch.randn(1, 2, 9), torch.randn(1, 2, 9), *cache.pages(0), step.slots(0))


def test_tables_and_tensors_on_other_devices_are_refused_by_name():
    q, pages = torch.randn(3, 4, 8), torch.randn(2, 2, 4, 8)
    where = {
        "block_table": torch.tensor([[0, 1]], dtype=torch.int32),
        "kv_lengths": torch.tensor([5], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
    }
    for name in where:
        moved = {**where, name: where[name].to("meta")}
        with pytest.raises(ValueError, match=f"{name} is on meta; q is on cpu"):
            paged_attention(q, pages, pages, *moved.values(), AttentionSpec(causal=True))
    k, slots = torch.randn(3, 2, 8), torch.arange(3)
    with pytest.raises(ValueError, match="slots is on meta; k is on cpu"):
        cache_append(k, k, pages, pages, slots.to("meta"))
    with pytest.raises(ValueError, match="v_pages is on meta; k is on cpu"):
        cache_append(k, k, pages, pages.to("meta"), slots)
    table = torch.randn(3, 4)
    for cos, sin in ((table.to("meta"), table), (table, table.to("meta"))):
        with pytest.raises(ValueError, match="(cos|sin) is on meta; k is on cpu"):
            ops.rotary_append(q, k, k, cos, sin, pages, pages, slots, interleaved=False)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_alibi_in_float64_is_float64(strategy):
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    slopes = torch.rand(2)
    golden, _ = attention_reference(q, q, q, AttentionSpec(causal=True), alibi_slopes=slopes)
    try:
        out, _ = attention(q, q, q, AttentionSpec(causal=True), alibi_slopes=slopes, strategy=strategy)
    except ValueError as refusal:
        assert "cannot serve" in str(refusal)
        return
    bound = 1e-12 if strategy.value in ("reference", "eager") else 1e-6
    torch.testing.assert_close(out, golden, atol=bound, rtol=bound)


def test_flags_and_layouts_are_named():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(TypeError, match="return_lse is 'yes'"):
        attention(q, q, q, return_lse="yes")
    with pytest.raises(TypeError, match="q is torch.sparse_coo; allowed: torch.strided"):
        attention(q.to_sparse(), q, q)
    k, pages, table = torch.randn(3, 2, 8), torch.randn(2, 2, 4, 8), torch.randn(3, 4)
    with pytest.raises(TypeError, match="interleaved is 'x'"):
        ops.rotary_append(k, k, k, table, table, pages, pages, torch.arange(3), interleaved="x")

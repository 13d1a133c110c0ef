"""int8 pages: kernels agree code for code, errors stay within half a step for each rounding, and every change of a
cache keeps codes and scales together.
"""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import AttentionSpec, KVCacheManager, KVQuantization, QuantizedPages, RotaryConfig, TransformerLayer
from atb_modules.kernels.reference.attention import paged_attention_reference
from atb_modules.ops import cache_append, paged_attention, rotary_append
from atb_modules.testing import (
    assert_parity,
    code_products_bound,
    fresh_generator,
    plain_paged_attention,
    poisoned_memory,
    quantization_bound,
    summation_orders,
)
from atb_modules.testing.devices import strategies_under_test

APPENDS = strategies_under_test("cache_append")
PAGED = strategies_under_test("paged_attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def empty_pages(num_pages, heads, page_size, dim):
    """Keys and values with codes and scales left from something else."""
    return [
        QuantizedPages(
            torch.full((num_pages, heads, page_size, dim), 99, dtype=torch.int8), torch.full((num_pages, heads), 7.0)
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_kernels_write_the_same_codes_within_half_a_step_for_each_rounding(dtype, data):
    generator = fresh_generator()
    heads, dim = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 8, 20, 64]))
    page_size = data.draw(st.sampled_from([1, 3, 16, 128]))
    counts = data.draw(st.lists(st.sampled_from([1, 1, 2, 7, 40]), min_size=1, max_size=6))
    total = sum(counts)
    order = torch.randperm(-(-total // page_size) + 1, generator=generator)
    at = torch.arange(total)
    slots = order[at // page_size] * page_size + at % page_size
    sizes = torch.rand(2, total, 1, 1, generator=generator) ** 3 * data.draw(st.sampled_from([0.0, 1e-3, 50.0]))
    states = (torch.randn(2, total, heads, dim, generator=generator) * sizes).to(dtype)
    pools = {strategy: empty_pages(order.numel(), heads, page_size, dim) for strategy in APPENDS}
    where = slots // page_size, slice(None), slots % page_size
    error, last = torch.zeros(2, 2, total, heads)
    begin = 0
    for count in counts:
        part = slice(begin, begin + count)
        begin += count
        for strategy, pools_of in pools.items():
            cache_append(*states[:, part], *pools_of, slots[part], strategy=strategy)
        for side, pages in enumerate(pools["reference"]):
            # Half a step for what is new, and again for what is held where its scale has grown.
            scale = pages.scales[slots[:begin] // page_size]
            error[side, :begin] += (scale > last[side, :begin]) * scale / 2
            last[side, :begin] = scale
    for side in range(2):
        truth = pools["reference"][side]
        for strategy, pools_of in pools.items():
            assert torch.equal(pools_of[side].codes[where], truth.codes[where]), strategy
            assert torch.equal(pools_of[side].scales[order[:-1]], truth.scales[order[:-1]]), strategy
        off = (truth.dequantized()[where] - states[side].float()).abs().amax(dim=-1)
        assert (off <= error[side] * (1 + 1e-5)).all()
        for page in order[:-1]:
            largest = states[side, slots // page_size == page].float().abs().amax(dim=(0, 2))
            assert torch.equal(truth.scales[page], largest / 127)


@pytest.mark.parametrize("strategy", APPENDS, ids=str)
def test_rotation_slots_and_a_page_begun_anew(strategy):
    generator = fresh_generator()
    q, k, v = torch.randn(3, 6, 2, 16, generator=generator)
    cos, sin = torch.randn(2, 6, 4, generator=generator)
    slots = torch.tensor([4, 5, -1, 6, 0, 1])
    pages, plain = empty_pages(3, 2, 4, 16), torch.zeros(2, 3, 2, 4, 16)
    turned, expected = q.clone(), q.clone()
    rotary_append(turned, k, v, cos, sin, *pages, slots, interleaved=False, strategy=strategy)
    rotary_append(expected, k, v, cos, sin, *plain, slots, interleaved=False, strategy="reference")
    torch.testing.assert_close(turned, expected)
    for quantized, exact in zip(pages, plain, strict=True):
        step = quantized.scales[:2, :, None, None]
        close = (quantized.dequantized()[:2] - exact[:2]).abs() <= step / 2 * (1 + 1e-5)
        assert close[0, :, :2].all() and close[1, :, :3].all()
        assert (quantized.codes[2] == 99).all() and (quantized.scales[2] == 7.0).all()
    # A small token in the first slot: the scale is its own again.
    cache_append(k[:1] * 1e-3, v[:1] * 0.0, *pages, torch.tensor([4]), strategy=strategy)
    torch.testing.assert_close(pages[0].scales[1], k[0].abs().amax(dim=-1) * 1e-3 / 127)
    assert (pages[1].scales[1] == 0).all() and (pages[1].codes[1, :, 0] == 0).all()


def filled(past, new, kv_heads, dim, page_size, generator, **options):
    longest = max(a + b for a, b in zip(past, new, strict=True))
    pages = sum(-(-(a + b) // page_size) for a, b in zip(past, new, strict=True)) + 1
    caches = [
        KVCacheManager(
            longest + 1, page_size, 1, kv_heads, dim, torch.float32, num_pages=pages, quantization=word, **options
        )
        for word in ("int8", "none")
    ]
    for cache in caches:
        cache.begin(len(past))
    for lengths in (past, new):
        k, v = torch.randn(2, sum(lengths), kv_heads, dim, generator=generator)
        for cache in caches:
            step = cache.step(lengths)
            cache_append(k, v, *cache.pages(0), step.slots(0))
    return *caches, step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", PAGED, ids=str)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_paged_attention(strategy, dtype, data):
    """The usual rules against the dequantised pages; the bound of the format against the values that went in."""
    generator = fresh_generator()
    rows = data.draw(st.integers(1, 3))
    past = data.draw(st.lists(st.integers(0, 70), min_size=rows, max_size=rows))
    new = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 9]), min_size=rows, max_size=rows))
    page_size = data.draw(st.sampled_from([1, 3, 16, 128]))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 5]))
    dim = data.draw(st.sampled_from([8, 20, 64, 80]))
    spec = AttentionSpec(
        causal=True,
        window=data.draw(st.sampled_from([None, (5, 0)])),
        softcap=data.draw(st.sampled_from([None, 4.0])),
    )
    extras = {
        name: torch.randn(kv_heads * group, generator=generator) if data.draw(st.booleans()) else None
        for name in ("sinks", "alibi_slopes")
    }
    if not sum(past) + sum(new):
        return
    cache, exact, step = filled(past, new, kv_heads, dim, page_size, generator)
    q = torch.randn(sum(new), kv_heads * group, dim, generator=generator).to(dtype)
    where = (step.block_table(0), step.kv_lengths, step.cu_seqlens_q, spec)
    wide = {name: None if t is None else t.double() for name, t in extras.items()}
    dequantized = [pages.dequantized(torch.float64) for pages in cache.pages(0)]
    golden, _ = paged_attention_reference(q.double(), *dequantized, *where, **wide)
    try:
        with poisoned_memory():
            out, lse = paged_attention(q, *cache.pages(0), *where, **extras, strategy=strategy)
    except ValueError as refusal:
        assert "cannot serve this paged_attention call" in str(refusal)
        return

    def plain(order=None):
        # The error of the format is not the kernel's: what it reads is exact in the yardstick, too.
        pages = [pages.dequantized() for pages in cache.pages(0)]
        return plain_paged_attention(q, *pages, *where, **extras, order=order)

    if strategy == "cpu" and dtype == torch.float32 and q.numel():
        most = [float(pages.abs().max()) for pages in dequantized]
        assert_parity(out, golden, reduction=80)
        assert ((out - golden).abs() <= code_products_bound(q, *most, spec.scale_for(dim))[..., None] + 1e-5).all()
    else:
        assert_parity(out, golden, summation_orders(plain), reduction=80, softcap=spec.softcap is not None)
    if dtype != torch.float32 or not q.numel():
        return
    steps = [pages.scales.amax() for pages in cache.pages(0)]
    largest = max(exact.gather(0, row)[1].abs().amax() for row in range(rows) if cache.lengths[row])
    bound = quantization_bound(q, *steps, largest, spec.scale_for(dim), roundings=2)
    truth, _ = paged_attention_reference(q.double(), *(p.double() for p in exact.pages(0)), *where, **wide)
    assert ((out - truth).abs() <= bound[..., None] + 1e-5).all()


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_changes_keep_codes_and_scales_together(page_size):
    """Fork, copy on write, crop, reorder, prefix and window: the same rows as in a cache of float32 pages."""
    generator = fresh_generator()
    options = {"num_kv_heads": 2, "num_pages": 90, "window": (None, 9)}
    caches = [
        KVCacheManager(80, page_size, 2, 4, 8, torch.float32, quantization=word, **options) for word in ("int8", "none")
    ]

    def push(*lengths):
        states = torch.randn(2, 2, sum(lengths), 2, 8, generator=generator) * torch.rand(1, generator=generator)
        for cache in caches:
            step = cache.step(lengths)
            for layer, (k, v) in enumerate(states):
                cache.append(step, layer, k, v)

    def agree():
        ours, exact = caches
        assert ours.lengths == exact.lengths
        for layer in range(2):
            # No page is written more often than it has slots, and each write rounds once.
            most = max(float(pages.scales.max()) for pages in ours.pages(layer)) / 2 * 5
            for row in range(ours.batch_size):
                for a, b in zip(ours.gather(layer, row), exact.gather(layer, row), strict=True):
                    assert a.shape == b.shape and (not a.numel() or (a - b).abs().max() <= most)

    for change in (
        lambda cache: cache.begin(2),
        lambda cache: cache.fork(0, 2),
        lambda cache: cache.crop([7, 13], rows=[1, 2]),
        lambda cache: cache.reorder([3, 1, 1, 2]),
        lambda cache: cache.register_prefix(3, list(range(cache.lengths[3])), salt="s"),
        lambda cache: cache.leave([1, 3]),
        lambda cache: cache.join_prefix(list(range(cache.lengths[0])), salt="s"),
    ):
        for cache in caches:
            change(cache)
        rows = caches[0].batch_size
        agree()
        push(*([5] + [1] * (rows - 1)))
        push(*([1] * (rows - 1) + [3]))
        agree()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(caches[0])))
    assert torch.equal(twin.gather(0, 0)[0], caches[0].gather(0, 0)[0])


def test_memory_is_counted_with_its_scales():
    cache = KVCacheManager(64, 16, 3, 4, 32, torch.float32, quantization="int8")
    stats = cache.memory_stats()
    held = [memory for layer in range(3) for pages in cache.pages(layer) for memory in (pages.codes, pages.scales)]
    assert stats.bytes_reserved == sum(memory.numel() * memory.element_size() for memory in held)
    assert cache.quantization is KVQuantization.INT8 and cache.page_dtype == torch.int8
    assert cache.grow(8) and cache.pages(2)[0].scales.shape == (8, 4)
    plain = KVCacheManager(64, 16, 3, 4, 32, torch.float32).memory_stats()
    assert 3.9 < plain.bytes_reserved / stats.bytes_reserved < 4


def test_a_layer_over_an_int8_cache():
    torch.manual_seed(0)
    layer = TransformerLayer(32, 4, num_kv_heads=2, rotary=RotaryConfig(), mode="inference")
    x = torch.randn(2, 12, 32)
    cache = KVCacheManager(64, 4, 1, 4, 8, torch.float32, num_kv_heads=2, num_pages=10, quantization="int8")
    parts = [layer(part, cache=cache) for part in x.split([6, 1, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), atol=0.03, rtol=0.03)


def test_compiled_writes_and_reads():
    torch._dynamo.reset()
    spec = AttentionSpec(causal=True)

    def step(q, k, v, pages, slots, table, lengths, starts):
        cache_append(k, v, *pages, slots, strategy="cpu")
        return paged_attention(q, *pages, table, lengths, starts, spec, strategy="cpu")[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    pools = [empty_pages(2, 2, 4, 8) for _ in range(2)]
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    for at in range(6):
        q, k, v = torch.randn(1, 4, 8), *torch.randn(2, 1, 2, 8)
        where = torch.tensor([(4 if at < 4 else 0) + at % 4]), table, torch.tensor([at + 1], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        outs = [run(q, k, v, pages, *where, starts) for run, pages in zip((step, compiled), pools, strict=True)]
        assert torch.equal(*outs)
    for a, b in zip(*pools, strict=True):
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)


def test_bound_of_a_single_key():
    """One key: the weight is 1 whatever its error, and the output is off by the value's error alone."""
    q = torch.randn(3, 8)
    assert torch.allclose(quantization_bound(q, 0.0, 0.5, 2.0, 1.0), torch.full((3,), 0.25, dtype=torch.float64))
    assert quantization_bound(torch.ones(8), 0.1, 0.0, 2.0, 0.5).item() == pytest.approx(2 * math.expm1(0.4))


def test_what_does_not_fit_is_named():
    codes, scales = torch.zeros(2, 1, 4, 8, dtype=torch.int8), torch.zeros(2, 1)
    with pytest.raises(TypeError, match="scales is NoneType"):
        QuantizedPages(codes, None)
    with pytest.raises(ValueError, match="codes is torch.float32"):
        QuantizedPages(codes.float(), scales)
    with pytest.raises(ValueError, match=r"scales is torch.float32 \(1, 2\)"):
        QuantizedPages(codes, scales.T)
    with pytest.raises(ValueError, match="quantization is 'int4'; allowed: 'none', 'int8'"):
        KVCacheManager(8, 4, 1, 1, 8, torch.float32, quantization="int4")
    pages, k = QuantizedPages(codes, scales), torch.randn(1, 1, 8)
    with pytest.raises(TypeError, match="k_pages is QuantizedPages, the other pages are a tensor"):
        cache_append(k, k, pages, codes.float(), torch.tensor([0]))
    with pytest.raises(TypeError, match="k_pages is torch.int8"):
        cache_append(k, k, codes, codes, torch.tensor([0]))
    with pytest.raises(ValueError, match="k_scales is None; the pages are torch.int8"):
        torch.ops.atb_modules.cache_append(k, k, codes, codes, torch.tensor([0]))
    strided = QuantizedPages(torch.zeros(2, 1, 8, 4, dtype=torch.int8).transpose(2, 3), scales)
    with pytest.raises(ValueError, match="k_pages and v_pages must be contiguous"):
        cache_append(k, k, strided, strided, torch.tensor([0]), strategy="cpu")

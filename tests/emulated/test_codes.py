"""int8 pages on the emulated NPU: codes as the CPU writes them, attention over them, and no wait of the host."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.attention.cache.manager import KVCacheManager
from atb_modules.attention.rope import RotaryConfig
from atb_modules.kernels.ascend import ops_codes
from atb_modules.kernels.host_values import remember
from atb_modules.kernels.pages import QuantizedPages
from atb_modules.kernels.reference.attention import paged_attention_reference
from atb_modules.kernels.registry import explain_choice, kernels, record_choices
from atb_modules.kernels.traits import (
    AttentionTraits,
    CacheAppendTraits,
    NormTraits,
    PagedAttentionTraits,
    RotaryTraits,
)
from atb_modules.models.config import ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.ops import cache_append, paged_attention, rotary_append
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator, plain_paged_attention, summation_orders
from atb_modules.testing.npu import EmulatedNPU

from ..kernels.ascend.test_reasons import TRAITS
from .borrowed import on_npu
from .helpers import DEVICE

CAUSAL = AttentionSpec(causal=True)
SPECS = {"causal": CAUSAL, "window": AttentionSpec(causal=True, window=(21, None)), "full": AttentionSpec()}
INFER = "npu::npu_fused_infer_attention_score_v2"


def on_device(pages):
    return [QuantizedPages(p.codes.to(DEVICE), p.scales.to(DEVICE)) for p in pages]


def left_over(num_pages, heads, size, dim):
    """Keys and values with codes and scales left from something else."""
    codes = torch.full((num_pages, heads, size, dim), 99, dtype=torch.int8)
    return [QuantizedPages(codes.clone(), torch.full((num_pages, heads), 7.0)) for _ in range(2)]


@pytest.mark.parametrize("knows", ["nobody", "the host", "nobody of many"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_codes_are_those_of_the_reference(knows, data):
    """Tokens in order, several rows in a step, tokens that are not written: every code and scale is the same."""
    generator = fresh_generator()
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    heads, dim, size = (data.draw(st.sampled_from(choices)) for choices in ([1, 3], [1, 8, 20], [1, 3, 16]))
    rows = data.draw(st.integers(1, 3))
    per_row = 2 + 60 // size
    order = torch.randperm(rows * per_row, generator=generator).view(rows, per_row)
    pages = left_over(rows * per_row, heads, size, dim)
    before = ops_codes._MOST_COMPARED
    ops_codes._MOST_COMPARED = 0 if knows == "nobody of many" else before
    try:
        with EmulatedNPU():
            there, lengths = on_device(pages), [0] * rows
            for _ in range(data.draw(st.integers(1, 4))):
                slots = []
                for row in range(rows):
                    count = data.draw(st.sampled_from([0, 1, 1, 2, 9]))
                    places = range(lengths[row], lengths[row] + count)
                    slots += [int(order[row, at // size]) * size + at % size for at in places]
                    lengths[row] += count
                slots += [-1] * data.draw(st.sampled_from([0, 0, 1, 2]))
                mixed = torch.randperm(len(slots), generator=generator)
                slots = torch.tensor(slots, dtype=torch.int64)[mixed]
                strength = data.draw(st.sampled_from([0.0, 1e-3, 1.0, 50.0]))
                k, v = (torch.randn(2, len(slots), heads, dim, generator=generator) * strength).to(dtype)
                cache_append(k, v, *pages, slots, strategy="reference")
                places = slots.to(DEVICE)
                if knows == "the host":
                    remember(places, slots.tolist())
                cache_append(k.to(DEVICE), v.to(DEVICE), *there, places, strategy="ascend")
            for mine, theirs in zip(there, pages, strict=True):
                assert torch.equal(mine.codes.cpu(), theirs.codes)
                assert torch.equal(mine.scales.cpu(), theirs.scales)
    finally:
        ops_codes._MOST_COMPARED = before


def test_keys_and_values_of_different_sizes(npu):
    generator = fresh_generator()
    pages = [left_over(3, 2, 4, 8)[0], left_over(3, 2, 4, 5)[0]]
    there, slots = on_device(pages), torch.tensor([4, 5, 0])
    k, v = torch.randn(3, 2, 8, generator=generator), torch.randn(3, 2, 5, generator=generator)
    cache_append(k, v, *pages, slots, strategy="reference")
    cache_append(k.to(DEVICE), v.to(DEVICE), *there, slots.to(DEVICE), strategy="ascend")
    for mine, theirs in zip(there, pages, strict=True):
        assert torch.equal(mine.codes.cpu(), theirs.codes) and torch.equal(mine.scales.cpu(), theirs.scales)


@pytest.mark.parametrize("known", [False, True])
def test_nothing_is_written_where_every_slot_is_minus_one(npu, known):
    pages, k = left_over(2, 2, 4, 8), torch.randn(3, 2, 8).to(DEVICE)
    there, slots = on_device(pages), torch.full((3,), -1).to(DEVICE)
    if known:
        remember(slots, [-1] * 3)
    cache_append(k, k, *there, slots, strategy="ascend")
    for mine, theirs in zip(there, pages, strict=True):
        assert torch.equal(mine.codes.cpu(), theirs.codes) and torch.equal(mine.scales.cpu(), theirs.scales)


def filled(past, new, size, dim, generator, kv_heads=2):
    """A cache of int8 pages on the host with ``past`` + ``new`` tokens a row, and the step of the last."""
    lengths = [a + b for a, b in zip(past, new, strict=True)]
    pages = sum(-(-n // size) for n in lengths) + 1
    cache = KVCacheManager(
        max(lengths) + 70, size, 1, kv_heads, dim, torch.float32, num_pages=pages, quantization="int8"
    )
    cache.begin(len(past))
    for counts in (past, new):
        k, v = torch.randn(2, sum(counts), kv_heads, dim, generator=generator)
        step = cache.step(counts)
        cache_append(k, v, *cache.pages(0), step.slots(0))
    return cache.pages(0), (step.block_table(0), step.kv_lengths, step.cu_seqlens_q)


PAST = {
    "decode": ([30, 0, 63, 200], [1, 1, 1, 1]),
    "prefill": ([0, 0, 0], [5, 130, 17]),
    "mixed": ([40, 0, 129, 7], [1, 9, 3, 0]),
    "an empty row": ([3, 0, 20], [1, 0, 1]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size,dim", [(32, 64), (128, 128), (16, 80)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("past,new", PAST.values(), ids=PAST.keys())
def test_attention_over_codes(npu, past, new, spec, size, dim, dtype):
    """Against the values that the codes stand for: what the format loses is not the kernel's.

    Where they are written out first, they are rounded to the queries' dtype, once, as if the pages had held it.
    """
    generator = fresh_generator()
    pages, where = filled(past, new, size, dim, generator)
    q = torch.randn(sum(new), 6, dim, generator=generator).to(dtype)
    as_they_lie = max(new) == 1 and size % 32 == 0 and dim % 32 == 0
    rounded = [p.dequantized().to(dtype) for p in pages]
    held = [p.dequantized(torch.float64) for p in pages] if as_they_lie else [p.double() for p in rounded]
    golden, golden_lse = paged_attention_reference(q.double(), *held, *where, spec)
    plain = summation_orders(lambda order=None: plain_paged_attention(q, *rounded, *where, spec, order=order))
    out, lse = on_npu(paged_attention)(q, *pages, *where, spec, return_lse=True, strategy="ascend")
    assert_parity(out, golden, plain, reduction=200)
    torch.testing.assert_close(lse.double(), golden_lse, atol=2e-2, rtol=2e-2)
    assert (npu.log.names.count(INFER) == 1) or not as_they_lie
    products = [name for name in npu.log.names if name.startswith(("aten::mul", "aten::bmm", "aten::_softmax"))]
    assert not as_they_lie or not products, products


def test_pages_behind_a_window_are_not_looked_up(npu):
    generator = fresh_generator()
    spec = AttentionSpec(causal=True, window=(30, None))
    for new in ([1, 1], [3, 1]):
        pages, (table, *rest) = filled([400, 90], new, 32, 64, generator)
        q = torch.randn(sum(new), 4, 64, generator=generator).bfloat16()
        before, _ = on_npu(paged_attention)(q, *pages, table, *rest, spec, strategy="ascend")
        freed = table.clone()
        for row, (n, count) in enumerate(zip(rest[0].tolist(), new, strict=True)):
            freed[row, : max(0, n - count - 30) // 32] = -1
        after, _ = on_npu(paged_attention)(q, *pages, freed, *rest, spec, strategy="ascend")
        assert before.isfinite().all() and torch.equal(before, after)


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_decode_step_waits_for_nothing(npu, dtype, size, turned):
    """AUTO, two layers, one token a row and a prompt before it: no operator makes the host wait."""
    cache = KVCacheManager(
        300, size, 2, 4, 64, dtype, num_kv_heads=2, num_pages=60, device="npu:0", quantization="int8"
    )
    cache.begin(2)
    for count in (140, 1, 1):
        rows = 2 * count
        q = torch.randn(rows, 4, 64).to(dtype).to(DEVICE)
        k, v = (torch.randn(rows, 2, 64).to(dtype).to(DEVICE) for _ in range(2))
        angles = torch.rand(rows, 32).to(DEVICE)
        for window in (None, (50, None)):
            with npu.forbid_host_sync(), record_choices() as choices:
                step = cache.step(count if window is None else 1)
                if window is not None:
                    q, k, v, angles = q[:2], k[:2], v[:2], angles[:2]
                for layer in range(2):
                    pages, slots = cache.pages(layer), step.slots(layer)
                    if turned:
                        rotary_append(q, k, v, angles, angles, *pages, slots, interleaved=False, trusted=True)
                    else:
                        cache_append(k, v, *pages, slots, trusted=True)
                    where = (step.block_table(layer), step.kv_lengths, step.cu_seqlens_q)
                    spec = AttentionSpec(causal=True, window=window)
                    out, _ = paged_attention(q, *pages, *where, spec, trusted=True)
            appended = "rotary_append" if turned else "cache_append"
            assert (appended, "ascend") in choices and len(choices) == 2
            assert dtype == torch.float32 or ("paged_attention", "ascend") in choices
            assert out.isfinite().all()


@pytest.mark.parametrize("known", [False, True])
def test_writes_wait_for_nothing_whoever_knows_the_slots(npu, known):
    """A static cache's slots are made on the device: nobody tells the host."""
    pages = on_device(left_over(4, 2, 16, 32))
    k = torch.randn(3, 2, 32).bfloat16().to(DEVICE)
    slots = torch.tensor([5, 20, -1]).to(DEVICE)
    if known:
        remember(slots, [5, 20, -1])
    with npu.forbid_host_sync():
        cache_append(k, k, *pages, slots, strategy="ascend", trusted=True)


def test_every_operator_of_a_step_has_a_kernel_of_torch_npu(npu):
    """None falls back to the CPU in silence, which would make the host wait on a device."""
    pages = on_device(left_over(6, 2, 32, 64))
    k = torch.randn(3, 2, 64).bfloat16().to(DEVICE)
    slots = torch.tensor([0, 33, 64]).to(DEVICE)
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32).to(DEVICE)
    lengths, starts = torch.tensor([34, 1]).int().to(DEVICE), torch.tensor([0, 1, 2]).int().to(DEVICE)
    q = torch.randn(2, 4, 64).bfloat16().to(DEVICE)
    npu.log.clear()
    cache_append(k, k, *pages, slots, strategy="ascend", trusted=True)
    paged_attention(q, *pages, table, lengths, starts, CAUSAL, strategy="ascend", trusted=True)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = sorted({name for name in npu.log.names if name.startswith("aten::")})
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    assert len(names) > 15
    missing = [name for name in names if not any(has(name, key) for key in ("PrivateUse1", *composite))]
    assert not missing, missing


def test_a_model_over_int8_pages_waits_once_a_token(npu):
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 96}
    rotary = (RotaryConfig(), RotaryConfig(base=50.0))
    config = ModelConfig(
        "llama", vocab_size=53, num_layers=2, windows=(None, 5), rotary=rotary, max_positions=99, **sizes
    )
    torch.manual_seed(5)
    model = DecoderModel(config, mode="inference").bfloat16().to(DEVICE)
    prompts = [[5, 6, 7], [8]]
    cache = KVCacheManager(
        64, 32, 2, 4, 32, torch.bfloat16, num_kv_heads=2, num_pages=8, window=(None, 5), device=DEVICE,
        quantization="int8",
    )  # fmt: skip
    calls = []
    model.generate(prompts, max_new_tokens=5, cache=cache, on_token=lambda row, token: calls.append(len(npu.log.calls)))
    steps = sorted(set(calls))
    waits = [sum(call.host_sync for call in npu.log.calls[a:b]) for a, b in itertools.pairwise(steps)]
    assert waits == [1] * 4
    assert INFER in npu.log.names


APPEND = CacheAppendTraits("npu", torch.bfloat16, torch.int8, 1, 2, 128)
READ = PagedAttentionTraits("npu", torch.bfloat16, torch.int8, 1, 1, 8, 2, 128, 128, 8)
#: one token, and many
SIZES = {
    CacheAppendTraits: [{"tokens": n} for n in (1, 3, 4096)],
    AttentionTraits: [{"q_len": n, "kv_len": n} for n in (1, 512)],
    NormTraits: [{"rows": n} for n in (1, 4096)],
    RotaryTraits: [{"tokens": n} for n in (1, 4096)],
}


@pytest.mark.parametrize("tokens", [1, 2, 40, 5000])
@pytest.mark.parametrize("page_dtype", [torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_auto_writes_by_our_own_kernel(npu, tokens, page_dtype):
    for op, changes in (("cache_append", {}), ("rotary_append", {"rotary": True})):
        traits = dataclasses.replace(APPEND, tokens=tokens, page_dtype=page_dtype, **changes)
        assert explain_choice(op, None, traits).chosen == "ascend"
    for batch in (1, 64):
        total = batch * tokens
        traits = dataclasses.replace(READ, batch=batch, total=total, max_blocks=max(8, tokens // 64))
        assert explain_choice("paged_attention", CAUSAL, traits).chosen == "ascend"


@pytest.mark.parametrize("changes", [{}, {"dtype": torch.float64}, {"dtype": torch.float32}], ids=str)
def test_auto_never_picks_the_reference_where_another_can(npu, changes):
    """Whatever our own kernels refuse of these calls, plain PyTorch comes before the reference."""
    calls = {**TRAITS, "cache_append": APPEND, "rotary_append": dataclasses.replace(APPEND, rotary=True)}
    compared = set()
    for op, traits in calls.items():
        if not any(kernel.strategy.value == "reference" for kernel in kernels(op)):
            continue
        for size in SIZES.get(type(traits), [{}]):
            table = explain_choice(
                op, CAUSAL if "attention" in op else None, dataclasses.replace(traits, **changes | size)
            )
            others = [row for row in table.rows if not row.reasons and row.strategy != "reference"]
            assert table.chosen != "reference" or not others, str(table)
            compared.add(op) if others else None
    assert {"cache_append", "rotary_append", "attention", "rms_norm", "rotary"} <= compared

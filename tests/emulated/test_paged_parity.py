"""Paged attention and cache writes on the emulated NPU against the float64 reference on the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atb_modules.attention.cache.manager import KVCacheManager
from atb_modules.attention.rope import RotaryConfig
from atb_modules.kernels.reference.attention import paged_attention_reference
from atb_modules.kernels.registry import _LOGGED, record_choices
from atb_modules.models.config import ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.ops import cache_append, paged_attention, rotary_append
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator, plain_paged_attention, summation_orders

from .borrowed import on_npu

PAST = {
    "decode": ([30, 0, 63, 200], [1, 1, 1, 1]),
    "prefill": ([0, 0, 0], [5, 130, 17]),
    "mixed": ([40, 0, 129, 7], [1, 9, 3, 0]),
    "an empty row": ([3, 0, 20], [1, 0, 1]),
}
SPECS = {
    "causal": AttentionSpec(causal=True),
    "window": AttentionSpec(causal=True, window=(21, None)),
    "scale": AttentionSpec(causal=True, scale=0.2),
    "full": AttentionSpec(),
}


def filled(past, new, page_size, dim, dtype, generator, kv_heads=2):
    """Pages whose unwritten slots hold NaN, tables, lengths and starts of rows with ``past`` + ``new`` tokens."""
    lengths = [a + b for a, b in zip(past, new, strict=True)]
    blocks = [-(-n // page_size) for n in lengths]
    order = iter(torch.randperm(sum(blocks) + 2, generator=generator).tolist())
    pages = torch.full((2, sum(blocks) + 2, kv_heads, page_size, dim), float("nan"), dtype=dtype)
    table = torch.full((len(past), max(blocks) + 1), -1, dtype=torch.int32)
    for row, n in enumerate(lengths):
        for block in range(blocks[row]):
            table[row, block] = page = next(order)
            room = min(page_size, n - block * page_size)
            pages[:, page, :, :room] = torch.randn(2, kv_heads, room, dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return *pages.unbind(), table, torch.tensor(lengths, dtype=torch.int32), starts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size,dim", [(16, 64), (128, 80), (48, 128), (512, 192)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("past,new", PAST.values(), ids=PAST.keys())
def test_paged_attention(npu, past, new, spec, page_size, dim, dtype):
    check_paged("ascend", past, new, spec, page_size, dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size,dim", [(16, 64), (48, 128)])
@pytest.mark.parametrize("spec", [SPECS["window"], AttentionSpec(softcap=3.0)], ids=["window", "softcap"])
def test_our_own_decode_kernel(npu, own_kernels, spec, page_size, dim, dtype):
    check_paged("ascend_c", *PAST["decode"], spec, page_size, dim, dtype)


def check_paged(strategy, past, new, spec, page_size, dim, dtype):
    generator = fresh_generator()
    where = filled(past, new, page_size, dim, dtype, generator)
    q = torch.randn(sum(new), 6, dim, generator=generator).to(dtype)
    golden, golden_lse = paged_attention_reference(q.double(), *(t.double() for t in where[:2]), *where[2:], spec)
    plain = summation_orders(partial(plain_paged_attention, q, *where, spec))
    out, lse = on_npu(paged_attention)(q, *where, spec, return_lse=True, strategy=strategy)
    assert_parity(out, golden, plain, reduction=200, softcap=spec.softcap is not None)
    torch.testing.assert_close(lse.double(), golden_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page_size", [16, 128])
def test_pages_behind_a_window_are_not_looked_up(npu, page_size):
    generator = fresh_generator()
    spec = AttentionSpec(causal=True, window=(30, None))
    for new in ([1, 1], [3, 1]):
        k, v, table, lengths, starts = filled([400, 90], new, page_size, 64, torch.bfloat16, generator)
        q = torch.randn(sum(new), 4, 64, generator=generator).bfloat16()
        before, _ = on_npu(paged_attention)(q, k, v, table, lengths, starts, spec, strategy="ascend")
        freed = table.clone()
        for row, (n, count) in enumerate(zip(lengths.tolist(), new, strict=True)):
            freed[row, : max(0, n - count - 30) // page_size] = -1
        after, _ = on_npu(paged_attention)(q, k, v, freed, lengths, starts, spec, strategy="ascend")
        assert before.isfinite().all() and torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_writes_go_where_the_cpu_writes_them(npu, dtype, interleaved):
    generator = fresh_generator()
    k, v = torch.randn(2, 7, 3, 32, generator=generator).to(dtype)
    q, slots = torch.randn(7, 6, 32, generator=generator).to(dtype), torch.tensor([5, 0, -1, 16, 31, 47, 20])
    cos, sin = torch.rand(2, 7, 12, generator=generator)
    for rotate in (False, True):
        results = []
        for call, strategy in ((lambda f: f, "torch"), (on_npu, "ascend")):
            pages, queries = torch.zeros(2, 3, 3, 16, 32, dtype=dtype), q.clone()
            if rotate:
                tensors = (queries, k, v, cos, sin, pages[0].clone(), pages[1].clone(), slots)
                call(rotary_append)(*tensors, interleaved=interleaved, strategy=strategy)
                results.append((tensors[0], tensors[5], tensors[6]))
            else:
                tensors = (k, v, pages[0].clone(), pages[1].clone(), slots)
                call(cache_append)(*tensors, strategy=strategy)
                results.append(tensors[2:4])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs)
            assert mine.abs().sum() > 0


def test_what_goes_another_way_is_logged(npu, caplog):
    """Pages that are views, and prompts over small pages: right, and said once each in the log of the kernels."""
    generator = fresh_generator()
    where = filled([20, 3], [4, 6], 16, 64, torch.bfloat16, generator)
    q = torch.randn(10, 4, 64, generator=generator).bfloat16()
    pages = torch.zeros(2, 3, 2, 16, 128).bfloat16().to("npu:0")[..., ::2]
    k, slots = torch.randn(2, 2, 64, generator=generator).bfloat16().to("npu:0"), torch.tensor([1, 17]).to("npu:0")
    with caplog.at_level("INFO", logger="atb_modules.kernels"):
        _LOGGED.clear()
        on_npu(paged_attention)(q, *where, SPECS["causal"], strategy="ascend")
        cache_append(k, k, *pages, slots, strategy="ascend")
    assert torch.equal(pages[0, 1, :, 1].cpu(), k[1].cpu())
    texts = [record.message for record in caplog.records]
    assert sum("paged_attention -> ascend goes by gathered keys" in text for text in texts) == 1
    assert sum("cache_append -> ascend goes by plain PyTorch" in text for text in texts) == 1


def test_a_decode_step_waits_for_nothing(npu):
    """Lengths, tables and slots of a step come from the host: no operator makes it wait, layer after layer."""
    cache = KVCacheManager(300, 128, 2, 4, 64, torch.bfloat16, num_kv_heads=2, num_pages=6, device="npu:0")
    cache.begin(2)
    q = torch.randn(2, 4, 64).bfloat16().to("npu:0")
    k, v = torch.randn(2, 2, 2, 64).bfloat16().to("npu:0").unbind()
    many = torch.randn(2 * 140, 2, 64).bfloat16().to("npu:0")
    step = cache.step(140)
    for layer in range(2):
        cache_append(many, many, *cache.pages(layer), step.slots(layer), strategy="ascend")
    for window in (None, (50, None)):
        with npu.forbid_host_sync(), record_choices() as choices:
            step = cache.step(1)
            for layer in range(2):
                pages = cache.pages(layer)
                cache_append(k, v, *pages, step.slots(layer), trusted=True)
                where = (step.block_table(layer), step.kv_lengths, step.cu_seqlens_q)
                spec = AttentionSpec(causal=True, window=window)
                out, _ = paged_attention(q, *pages, *where, spec, trusted=True)
        assert {op for op, _ in choices} == {"cache_append", "paged_attention"}
        assert {strategy for _, strategy in choices} <= {"ascend", "ascend_c"}
        assert out.isfinite().all()


def test_a_generated_token_waits_once(npu):
    """A whole model's decode step makes the host wait for the sampled token alone."""
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 96}
    rotary = (RotaryConfig(), RotaryConfig(base=50.0))
    config = ModelConfig(
        "llama", vocab_size=53, num_layers=2, windows=(None, 5), rotary=rotary, max_positions=99, **sizes
    )
    model = DecoderModel(config, mode="inference").bfloat16().to("npu:0")
    ids = torch.randint(0, 53, (2, 9)).to("npu:0")
    waits = []
    for count in (3, 13):
        npu.log.clear()
        model.generate(ids, max_new_tokens=count)
        waits.append(len(npu.log.host_syncs))
    assert waits[1] - waits[0] == 10

"""Short queries over long keys: keys split over the threads, and one query over keys that lie as in pages."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.ops import attention
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator, plain_attention, summation_orders

SPECS = {
    "causal": AttentionSpec(causal=True),
    "window": AttentionSpec(causal=True, window=(700, None)),
    "two_sided": AttentionSpec(window=(5, 3)),
    "global": AttentionSpec(causal=True, window=(300, None), global_tokens=9),
    "softcap": AttentionSpec(causal=True, softcap=5.0),
    "top_left": AttentionSpec(causal="top_left"),
}


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("name", SPECS)
def test_against_the_reference(name, q_len, dtype, threads):
    spec, generator = SPECS[name], fresh_generator()
    for batch, heads, kv_heads, kv_len in ((1, 4, 1, 1300), (3, 3, 3, 517), (1, 6, 3, 40)):
        q = torch.randn(batch, heads, q_len, 24, generator=generator).to(dtype)
        k, v = (torch.randn(batch, kv_heads, kv_len, 24, generator=generator).to(dtype) for _ in range(2))
        for sinks in (None, torch.randn(heads, generator=generator)):
            wide = None if sinks is None else sinks.double()
            golden, golden_lse = attention_reference(q.double(), k.double(), v.double(), spec, sinks=wide)
            out, lse = attention(q, k, v, spec, sinks=sinks, return_lse=True, strategy="cpu")
            plain = summation_orders(partial(plain_attention, q, k, v, spec, sinks=sinks))
            assert_parity(out, golden, plain, reduction=kv_len, softcap=spec.softcap is not None, what=name)
            bound = 3e-6 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(lse.double(), golden_lse, atol=bound, rtol=bound)
            again, _ = attention(q, k, v, spec, sinks=sinks, strategy="cpu")
            assert torch.equal(out, again)


@pytest.mark.parametrize("layout", ["contiguous", "static", "tokens_first", "expanded", "one_head", "reversed_values"])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_query_over_keys_of_any_layout(layout, batch, threads):
    generator = fresh_generator()
    kv_heads = 1 if layout == "one_head" else 2
    q = torch.randn(batch, 4, 1, 20, generator=generator)
    k, v = (torch.randn(batch, kv_heads, 600, 20, generator=generator) for _ in range(2))
    if layout == "static":  # the filled part of longer buffers, NaN behind it
        k[:, :, 500:] = v[:, :, 500:] = float("nan")
        k, v = k[:, :, :500], v[:, :, :500]
    elif layout == "tokens_first":
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    elif layout == "expanded":
        k, v = (t[:, :1].expand(batch, 2, 600, 20) for t in (k, v))
    elif layout == "reversed_values":
        v = v.flip(2).transpose(1, 2).contiguous().transpose(1, 2)
    spec = AttentionSpec(causal=True, window=(555, None))
    out, lse = attention(q, k, v, spec, return_lse=True, strategy="cpu")
    golden, golden_lse = attention_reference(q.double(), k.double(), v.double(), spec)
    torch.testing.assert_close(out.double(), golden, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), golden_lse, atol=2e-6, rtol=2e-6)


def test_a_row_that_sees_nothing_stays_empty(threads):
    """More queries than keys, and a window that ends before the keys do."""
    q, (k, v) = torch.randn(1, 2, 9, 16), torch.randn(2, 1, 1, 600, 16)
    spec = AttentionSpec(causal=True)
    out, lse = attention(q, k[:, :, :4], v[:, :, :4], spec, return_lse=True, strategy="cpu")
    assert torch.equal(out[:, :, :5], torch.zeros(1, 2, 5, 16))
    assert bool(lse[:, :, :5].isneginf().all())
    block_mask = torch.zeros(1, 1, 1, 10, dtype=torch.bool)
    out, lse = attention(q, k, v, AttentionSpec(block_size=60), block_mask=block_mask, return_lse=True, strategy="cpu")
    assert not out.any()
    assert bool(lse.isneginf().all())

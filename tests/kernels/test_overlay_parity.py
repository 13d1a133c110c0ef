"""Every attention kernel under every overlay: global tokens, prefixes, chunks, images, packed segments, live blocks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.ops import attention
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator, plain_attention, poisoned_memory, summation_orders
from atb_modules.testing.devices import strategies_under_test

STRATEGIES = strategies_under_test("attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def images(rows: int, kv_len: int, generator: torch.Generator) -> torch.Tensor:
    """Runs of a few tokens, some of them images."""
    runs = torch.randint(-2, 3, (rows, kv_len // 5 + 1), generator=generator)
    return runs.repeat_interleave(5, dim=1)[:, :kv_len]


def blocks(q_len: int, kv_len: int, size: int, heads: int, generator: torch.Generator) -> torch.Tensor:
    live = torch.rand(1, heads, -(-q_len // size), -(-kv_len // size), generator=generator) > 0.6
    live[..., 0, :] = False  # rows of blocks that see nothing
    return live


#: name -> spec and what makes the overlay tensors for (batch, heads, q_len, kv_len)
CASES = {
    "global": (AttentionSpec(window=(6, 6), global_tokens=3), None),
    "causal_global": (AttentionSpec(causal=True, window=(6, None), global_tokens=3), None),
    "prefix": (AttentionSpec(causal=True, prefix=11), None),
    "window_prefix": (AttentionSpec(causal=True, window=(4, None), prefix=5), None),
    "chunk": (AttentionSpec(causal=True, chunk=8), None),
    "two_way_chunk": (AttentionSpec(chunk=16, softcap=5.0), None),
    "images": (AttentionSpec(causal=True), "images"),
    "window_images": (AttentionSpec(causal=True, window=(3, None)), "images"),
    "packed": (AttentionSpec(causal=True), "packed"),
    "packed_window": (AttentionSpec(window=(5, 4)), "packed"),
    "packed_all": (AttentionSpec(causal=True, window=(3, None), global_tokens=2, prefix=4), "packed_images"),
    "blocks": (AttentionSpec(block_size=16), "blocks"),
    "blocks_a_head": (AttentionSpec(causal=True, block_size=7), "blocks_a_head"),
    "blocks_window": (AttentionSpec(causal=True, window=(40, None), global_tokens=2, block_size=16), "blocks"),
}
#: batch, heads, kv_heads, q_len, kv_len, head_dim
SHAPES = [(2, 4, 2, 33, 33, 16), (1, 2, 1, 70, 131, 72), (1, 3, 3, 130, 130, 20)]


def overlays_of(kind, shape, generator) -> dict[str, torch.Tensor]:
    batch, heads, _, q_len, kv_len, _ = shape
    found: dict[str, torch.Tensor] = {}
    if kind is None:
        return found
    if "packed" in kind:
        found["cu_seqlens_q"] = starts(q_len // 4, 0, q_len - q_len // 4)
        found["cu_seqlens_k"] = starts(kv_len // 3, 2, kv_len - kv_len // 3 - 2)
    if "images" in kind:
        found["image_ids"] = images(1 if "packed" in kind else batch, kv_len, generator)
    if "blocks" in kind:
        size = 7 if kind == "blocks_a_head" else 16
        found["block_mask"] = blocks(q_len, kv_len, size, heads if kind == "blocks_a_head" else 1, generator)
    return found


def draw(shape, kind, dtype, generator):
    batch, heads, kv_heads, q_len, kv_len, dim = shape
    batch = 1 if kind is not None and "packed" in kind else batch
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(batch, h, n, dim, generator=generator).to(dtype) for h, n in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_forward_and_lse(strategy, case, dtype):
    spec, kind = CASES[case]
    generator = fresh_generator()
    for shape in SHAPES:
        q, k, v = draw(shape, kind, dtype, generator)
        tensors = overlays_of(kind, shape, generator)
        extras = {}
        if "window" in case:
            extras["alibi_slopes"] = torch.rand(q.shape[1], generator=generator)
        elif case != "chunk":
            extras["sinks"] = torch.randn(q.shape[1], generator=generator)
        overlays = Overlays(**tensors)
        wide = {name: t.double() for name, t in extras.items()}
        golden, golden_lse = attention_reference(q.double(), k.double(), v.double(), spec, overlays=overlays, **wide)
        plain = partial(plain_attention, q, k, v, spec, overlays=overlays, **extras)
        for return_lse in (True, False):
            try:
                with poisoned_memory():
                    out, lse = attention(q, k, v, spec, strategy=strategy, return_lse=return_lse, **tensors, **extras)
            except ValueError as refusal:
                assert "cannot serve" in str(refusal)
                continue
            capped = spec.softcap is not None
            assert_parity(out, golden, summation_orders(plain), reduction=k.shape[2], softcap=capped, what=case)
            if lse is not None:
                bound = 3e-6 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(lse.double(), golden_lse, atol=bound, rtol=bound)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_gradients(strategy, case):
    """Of q, k, v and sinks, through the output and, where the strategy has it, through the LSE."""
    spec, kind = CASES[case]
    generator = fresh_generator()
    for shape in SHAPES:
        tensors = overlays_of(kind, shape, generator)
        leaves = [*draw(shape, kind, torch.float32, generator), torch.randn(shape[1], generator=generator)]
        wide = [t.double().requires_grad_() for t in leaves]
        golden, golden_lse = attention_reference(*wide[:3], spec, overlays=Overlays(**tensors), sinks=wide[3])
        weights = [torch.randn(t.shape, generator=generator).double() for t in (golden, golden_lse)]
        finite = golden_lse.isfinite()
        for through_lse in (False, True):
            mine = [t.clone().requires_grad_() for t in leaves]
            try:
                out, lse = attention(
                    *mine[:3], spec, sinks=mine[3], strategy=strategy, return_lse=through_lse, **tensors
                )
            except ValueError as refusal:
                assert "cannot serve" in str(refusal)
                continue
            loss, want = (out * weights[0].float()).sum(), (golden * weights[0]).sum()
            if through_lse:
                loss = loss + (lse * weights[1].float())[finite].sum()
                want = want + (golden_lse * weights[1])[finite].sum()
            expected = torch.autograd.grad(want, wide, retain_graph=True)
            for got, truth in zip(torch.autograd.grad(loss, mine), expected, strict=True):
                torch.testing.assert_close(got.double(), truth, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_packed_tensors_without_a_batch_axis_and_separate_calls_agree(strategy):
    generator = fresh_generator()
    lengths = [5, 0, 64, 131]
    q, k, v = (torch.randn(200, heads, 24, generator=generator) for heads in (4, 2, 2))
    cu = starts(*lengths)
    spec = AttentionSpec(causal=True)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "strategy": strategy}
    try:
        out, lse = attention(q, k, v, spec, return_lse=True, **options)
    except ValueError as refusal:
        assert "LSE" in str(refusal)
        out, lse = attention(q, k, v, spec, **options)
    assert out.shape == (200, 4, 24)
    for begin, length in zip(cu.tolist(), lengths, strict=False):
        part = slice(begin, begin + length)
        alone, alone_lse = attention_reference(*(t[part].transpose(0, 1)[None].double() for t in (q, k, v)), spec)
        torch.testing.assert_close(out[part].double(), alone[0].transpose(0, 1), atol=2e-6, rtol=2e-6)
        if lse is not None:
            assert lse.shape == (4, 200)
            torch.testing.assert_close(lse[:, part].double(), alone_lse[0], atol=2e-6, rtol=2e-6)


#: specs of a few tokens, each with one kind of structure, and all of them at once
SMALL = {
    "window": (AttentionSpec(window=(2, 1)), ()),
    "causal_window": (AttentionSpec(causal=True, window=(2, None)), ()),
    "global": (AttentionSpec(causal=True, window=(1, None), global_tokens=2), ()),
    "prefix": (AttentionSpec(causal=True, prefix=3), ()),
    "chunk": (AttentionSpec(causal=True, chunk=3, softcap=2.0), ()),
    "packed": (AttentionSpec(causal=True), ("cu_seqlens_q", "cu_seqlens_k")),
    "images": (AttentionSpec(causal=True), ("image_ids",)),
    "blocks": (AttentionSpec(block_size=2), ("block_mask",)),
    "all": (
        AttentionSpec(causal=True, window=(2, None), global_tokens=1, block_size=2),
        ("cu_seqlens_q", "cu_seqlens_k", "image_ids", "block_mask"),
    ),
}


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("strategy", ["eager", "blocked"])
def test_gradcheck_in_float64(strategy, case):
    """Outputs and LSE of the strategies that take float64, for every spec."""
    generator = torch.Generator().manual_seed(5)
    spec, names = SMALL[case]
    leaves = [torch.randn(1, 2, 7, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    tensors = {
        "cu_seqlens_q": starts(3, 4),
        "cu_seqlens_k": starts(3, 4),
        "image_ids": torch.tensor([[-1, 0, 0, -1, 1, 1, -1]]),
        "block_mask": blocks(7, 7, 2, 2, generator),
    }
    tensors = {name: tensors[name] for name in names}

    def both(*qkv):
        out, lse = attention(*qkv, spec, return_lse=True, strategy=strategy, **tensors)
        return out, lse.masked_fill(~lse.isfinite(), 0.0)

    assert torch.autograd.gradcheck(both, leaves, fast_mode=True)

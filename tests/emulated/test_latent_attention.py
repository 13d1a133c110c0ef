"""LatentAttention on the emulated NPU: decode steps by ATB's operator over the compressed cache, and its limits."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import KVCacheManager, LatentAttention
from atb_modules.attention.functional import paged_attention
from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.registry import explain_call, record_choices
from atb_modules.spec import AttentionSpec
from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import EmulatedNPU

from .helpers import DEVICE, TOLERANCE, assert_near

OPERATOR = "atb::_npu_paged_attention_mla"
HALVES = [torch.float16, torch.bfloat16]
H, B, F = torch.float16, torch.bfloat16, torch.float32


def build(dtype, heads=4, rank=512, rope=64):
    """A module of ``dtype`` and its float64 twin with the same weights."""
    torch.manual_seed(5)
    sizes = {"kv_lora_rank": rank, "qk_nope_head_dim": 32, "qk_rope_head_dim": rope, "v_head_dim": 16}
    module = LatentAttention(64, heads, q_lora_rank=48, dtype=torch.float64, **sizes)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.12)
    module = module.to(dtype)
    return module, copy.deepcopy(module).double()


def cache_for(module, dtype, device, page_size=128):
    sizes = (1024, page_size, 1, module.num_heads, module.head_dim, dtype)
    return KVCacheManager(*sizes, num_kv_heads=1, num_pages=24 if page_size == 128 else 96, device=device)


def run(module, x, steps, dtype, device, page_size=128):
    """Outputs of every row through the ragged ``steps``."""
    cache = cache_for(module, dtype, device, page_size)
    cache.begin(len(x))
    done, outs = [0] * len(x), [[] for _ in x]
    for lengths in steps:
        parts = [x[row][done[row] : done[row] + n] for row, n in enumerate(lengths)]
        out = module(torch.cat(parts).to(device), kv_cache=cache, cache_step=cache.step(lengths), cache_layer=0)
        for row, piece in enumerate(out.cpu().split(lengths)):
            outs[row].append(piece)
            done[row] += lengths[row]
    return [torch.cat(pieces) for pieces in outs]


def inputs(steps, dtype):
    generator = fresh_generator()
    totals = [sum(step[row] for step in steps) for row in range(len(steps[0]))]
    return [torch.randn(total, 64, generator=generator).to(dtype) for total in totals]


def assert_rows_near(got, want, dtype):
    for mine, truth in zip(got, want, strict=True):
        bound = 4 * TOLERANCE[dtype] * max(1.0, float(truth.abs().max()))
        torch.testing.assert_close(mine.double(), truth, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [1, 8])
def test_decode_steps_are_one_operator(npu, dtype, heads):
    module, wide = build(dtype, heads)
    steps = [[130, 1, 40], [1, 1, 1], [1, 1, 1], [1, 0, 1]]
    x = inputs(steps, dtype)
    with record_choices() as choices:
        got = run(module.to(DEVICE), x, steps, dtype, DEVICE)
    assert npu.log.names.count(OPERATOR) == 3
    assert ("paged_attention", "ascend") in choices
    assert_rows_near(got, run(wide, [row.double() for row in x], steps, torch.float64, "cpu"), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mixed_steps_and_chunks_are_right(npu, dtype):
    """Several tokens after others, beside rows with one and with none: gathered, a fused attention a row."""
    module, wide = build(dtype)
    steps = [[30, 5, 1], [7, 1, 0], [1, 130, 2]]
    x = inputs(steps, dtype)
    got = run(module.to(DEVICE), x, steps, dtype, DEVICE)
    assert OPERATOR not in npu.log.names and "npu::npu_fusion_attention" in npu.log.names
    assert_rows_near(got, run(wide, [row.double() for row in x], steps, torch.float64, "cpu"), dtype)


def test_a_decode_step_waits_for_nothing(npu):
    module, _ = build(H)
    module = module.to(DEVICE)
    cache = cache_for(module, H, DEVICE)
    cache.begin(2)
    x = torch.randn(10, 64, dtype=H)
    module(x.to(DEVICE), kv_cache=cache, cache_step=cache.step([6, 4]), cache_layer=0)
    token = torch.randn(2, 64, dtype=H).to(DEVICE)
    with npu.forbid_host_sync():
        for _ in range(2):
            module(token, kv_cache=cache, cache_step=cache.step([1, 1]), cache_layer=0)
    assert npu.log.names.count(OPERATOR) == 2


def test_block_tables_that_change_beside_the_same_lengths(npu):
    """Written to in place, or another tensor: what was made of the old one serves neither."""
    generator = fresh_generator()
    q, pages = (torch.randn(shape, generator=generator).half() for shape in ((2, 16, 576), (6, 1, 128, 576)))
    tables = [torch.tensor(pair, dtype=torch.int32) for pair in ([[3, 1], [0, 2]], [[4, 5], [2, 0]], [[1, 0], [5, 3]])]
    rest = torch.tensor([140, 9]).int(), torch.tensor([0, 1, 2]).int(), AttentionSpec(causal=True)
    there = [t.to(DEVICE) for t in (q, pages, *rest[:2])]
    place = tables[0].to(DEVICE)
    for turn, table in enumerate(tables):
        place = table.to(DEVICE) if turn == 2 else place.copy_(table.to(DEVICE))
        out, _ = paged_attention(
            there[0], there[1], there[1], place, *there[2:], rest[2], value_dim=512, strategy="ascend"
        )
        want, _ = paged_attention(
            q.double(), pages.double(), pages.double(), table, *rest, value_dim=512, strategy="reference"
        )
        assert_near(out, want)
    assert npu.log.names.count(OPERATOR) == 3


@pytest.mark.parametrize("page_size,heads,rank,rope", [(16, 4, 512, 64), (128, 3, 512, 64), (128, 4, 528, 48)])
def test_what_the_operator_does_not_take_is_computed_without_it(npu, page_size, heads, rank, rope):
    module, wide = build(H, heads, rank, rope)
    steps = [[9, 20], [1, 1]]
    x = inputs(steps, H)
    got = run(module.to(DEVICE), x, steps, H, DEVICE, page_size)
    assert OPERATOR not in npu.log.names
    assert_rows_near(got, run(wide, [row.double() for row in x], steps, torch.float64, "cpu", page_size), H)


def call(dtype=H, page_dtype=None, heads=4, kv_heads=1, channels=576, page_size=128, value_dim=512, **more):
    """Arguments of a decode call over one tensor of pages."""
    page_dtype = page_dtype or dtype
    pages = torch.ones(3, kv_heads, page_size, channels, dtype=page_dtype, device=DEVICE)
    table = torch.tensor([[1], [2]], dtype=torch.int32).to(DEVICE)
    lengths, starts = (torch.tensor(n, dtype=torch.int32).to(DEVICE) for n in ([5, 9], [0, 1, 2]))
    spec = AttentionSpec(causal=True, **more.pop("spec", {}))
    q = torch.ones(2, heads, channels, dtype=dtype, device=DEVICE)
    return (q, pages, pages, table, lengths, starts, spec), {"value_dim": value_dim, **more}


@pytest.mark.parametrize(
    "changes,soc,reason",
    [
        ({"dtype": F}, "ascend910b1", "takes float16, bfloat16, the call is float32"),
        ({}, "ascend310p", "atb::_npu_paged_attention_mla does not run on Ascend310P3"),
        ({"dtype": B}, "ascend310p", "Ascend310P3 does not compute in bfloat16"),
        ({"page_dtype": F}, "ascend910b1", "takes pages of the queries' dtype torch.float16"),
        ({"value_dim": 500}, "ascend910b1", "takes 512 latent and 64 rotary channels, the call has 500 and 76"),
        ({"channels": 640}, "ascend910_93", "takes 512 latent and 64 rotary channels, the call has 512 and 128"),
        ({"value_dim": None}, "ascend910b1", "takes head sizes up to 512 in steps of 16, the call has 576"),
        ({"heads": 4, "kv_heads": 2}, "ascend910b1", "takes one key head here, the call has 2"),
        ({"heads": 6}, "ascend950", "takes 1, 2, 4, ... 128 heads, the call has 6"),
        ({"heads": 256}, "ascend910b1", "takes 1, 2, 4, ... 128 heads, the call has 256"),
        ({"page_size": 64}, "ascend910_93", "is right over pages of 128 tokens, these have 64"),
        ({"page_size": 256}, "ascend910b1", "is right over pages of 128 tokens, these have 256"),
        ({"return_lse": True}, "ascend910b1", "returns no LSE"),
        ({"spec": {"window": (3, None)}}, "ascend910b1", "knows no window"),
        ({"spec": {"softcap": 4.0}}, "ascend910b1", "has no softcap"),
    ],
)
def test_refused_with_the_rule(npu, changes, soc, reason):
    with assume_soc(soc):
        arguments, options = call(**changes)
        found = explain_call(paged_attention, *arguments, **options)
        (row,) = [row for row in found.rows if row.strategy == "ascend"]
        assert any(reason in said for said in row.reasons), row.reasons
        assert found.chosen not in (None, "ascend")


@pytest.mark.parametrize("soc", ["ascend910b1", "ascend910_93", "ascend950"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_accepted(npu, soc, dtype, heads):
    with assume_soc(soc):
        arguments, options = call(dtype, heads=heads)
        out, lse = paged_attention(*arguments, **options, strategy="ascend")
    assert out.shape == (2, heads, 512) and lse is None and (out.cpu() == 1).all()
    assert OPERATOR in npu.log.names


@given(
    soc=st.sampled_from(["ascend910b1", "ascend910_93", "ascend310p", "ascend950"]),
    dtype=st.sampled_from([F, H, B]),
    heads=st.sampled_from([1, 2, 3, 128, 256]),
    kv_heads=st.sampled_from([1, 1, 1, 2]),
    channels=st.sampled_from([576, 576, 576, 580, 640]),
    page_size=st.sampled_from([128, 128, 16, 256]),
    new=st.sampled_from([(1, 1), (0, 1), (2, 1)]),
    more=st.sampled_from([{}, {}, {"return_lse": True}, {"spec": {"window": (3, None)}}, {"value_dim": 510}]),
)
@settings(max_examples=60, deadline=None)
def test_what_the_record_accepts_the_operator_accepts(soc, dtype, heads, kv_heads, channels, page_size, new, more):
    heads = max(heads, kv_heads) * (kv_heads if heads % kv_heads else 1)
    with assume_soc(soc), EmulatedNPU(soc=soc):
        arguments, options = call(dtype, None, heads, kv_heads, channels, page_size, **more)
        q, pages, _, table, lengths, _, spec = arguments
        starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32).to(DEVICE)
        q = torch.cat([q, q])[: sum(new)]
        try:
            out, _ = paged_attention(q, pages, pages, table, lengths, starts, spec, **options, strategy="ascend")
        except ValueError as refusal:
            assert "cannot serve this" in str(refusal), refusal
        else:
            assert out.shape[-1] == 512 and (out.cpu() == 1).all()

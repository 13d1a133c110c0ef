"""Attention over whole prompts on the inference chip 310P, emulated: parity with the CPU, and the operator's rules."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from atb_modules.attention.cache.manager import KVCacheManager
from atb_modules.kernels.ascend.availability import assume_soc
from atb_modules.kernels.reference.attention import attention_reference, paged_attention_reference
from atb_modules.kernels.registry import record_choices
from atb_modules.ops import attention, cache_append, paged_attention
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator, plain_paged_attention, summation_orders
from atb_modules.testing.npu import EmulatedNPU, OperatorError

from .borrowed import borrow, on_npu, parity_tests
from .helpers import DEVICE, assert_near, draw
from .test_codes import filled as filled_codes
from .test_paged_parity import PAST, SPECS, filled
from .test_planted_faults import Tampered

PROMPT = "npu::npu_prompt_flash_attention"
HALF = torch.float16
#: of gradients and of float32, which are refused here
ELSEWHERE = ("test_lse_is_differentiable_where_it_is_returned", "test_grouped_heads_read_their_own_key_head")
BORROWED = parity_tests(borrow("kernels/test_attention_parity.py", ("attention",)), ELSEWHERE)
globals().update({f"{name}_on_310p": test for name, test in BORROWED.items()})


@pytest.fixture(autouse=True)
def chip(request):
    """Every test here believes in a 310P, or in the chip that it asks for, and its operators hold to its rules."""
    soc = getattr(request, "param", "ascend310p")
    with assume_soc(soc), EmulatedNPU(soc=soc) as emulated:
        yield emulated


def drawn(generator, batch, heads, kv_heads, q_len, kv_len, dim, value_dim=None):
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, value_dim or dim)
    return [draw(generator, *shape, dtype=HALF) for shape in shapes]


CAUSAL = AttentionSpec(causal=True)
STRUCTURES = {
    "full": AttentionSpec(),
    "causal": CAUSAL,
    "top left": AttentionSpec(causal="top_left"),
    "window": AttentionSpec(causal=True, window=(5, None)),
    "both sides": AttentionSpec(window=(3, 2)),
    "prefix": AttentionSpec(causal=True, prefix=4),
    "scale": AttentionSpec(causal=True, scale=0.3),
}
#: batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim
SIZES = [
    (2, 4, 2, 128, 128, 64, 64),
    (2, 6, 3, 40, 57, 72, 72),
    (1, 2, 2, 9, 4, 16, 8),
    (3, 4, 1, 1, 33, 24, 40),
    (130, 2, 1, 5, 7, 16, 16),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("spec", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_prompts(chip, spec, sizes):
    """By the operator and nothing else that attends; rows that see nothing give 0."""
    *shape, value_dim = sizes
    q, k, v = drawn(fresh_generator(), *shape, value_dim)
    out, _ = on_npu(attention)(q, k, v, spec, strategy="ascend")
    want, _ = attention_reference(q.double(), k.double(), v.double(), spec)
    assert_near(out, want)
    assert PROMPT in chip.log.names and not [n for n in chip.log.names if "softmax" in n or "bmm" in n]


@pytest.mark.parametrize("shape", [(40, 57), (2, 1, 40, 57), (2, 6, 40, 57), (1, 6, 1, 57), (2, 1, 1, 57)], ids=str)
def test_masks_of_rows_and_of_heads(chip, shape):
    generator = fresh_generator()
    q, k, v = drawn(generator, 2, 6, 3, 40, 57, 32)
    shown = torch.rand(shape, generator=generator) < 0.5
    shown[..., :1, :] = False  # a row that sees nothing, where there are several
    for spec in (AttentionSpec(), CAUSAL):
        out, _ = on_npu(attention)(q, k, v, spec, mask=shown, strategy="ascend")
        want, _ = attention_reference(q.double(), k.double(), v.double(), spec, mask=shown)
        assert_near(out, want)


def test_masks_of_many_heads_go_in_by_128(chip):
    generator = fresh_generator()
    q, k, v = drawn(generator, 9, 16, 16, 4, 6, 16)
    shown = torch.rand(9, 16, 4, 6, generator=generator) < 0.7
    out, _ = on_npu(attention)(q, k, v, mask=shown, strategy="ascend")
    assert_near(out, attention_reference(q.double(), k.double(), v.double(), AttentionSpec(), mask=shown)[0])
    assert chip.log.names.count(PROMPT) == 2


def test_packed_sequences_and_images(chip):
    generator = fresh_generator()
    q, k, v = drawn(generator, 1, 4, 2, 40, 40, 32)
    starts = torch.tensor([0, 13, 33, 40], dtype=torch.int32)
    images = torch.full((1, 40), -1)
    images[:, 3:9] = 0
    for more in ({"cu_seqlens_q": starts, "cu_seqlens_k": starts}, {"image_ids": images}):
        out, _ = on_npu(attention)(q, k, v, CAUSAL, strategy="ascend", **more)
        overlays = Overlays(more.get("cu_seqlens_q"), more.get("cu_seqlens_k"), more.get("image_ids"))
        assert_near(out, attention_reference(q.double(), k.double(), v.double(), CAUSAL, overlays=overlays)[0])


def test_auto_takes_it_for_prompts(chip):
    q, k, v = drawn(fresh_generator(), 1, 8, 2, 512, 512, 64)
    with record_choices() as choices, torch.no_grad():
        on_npu(attention)(q, k, v, CAUSAL)
    assert list(choices) == [("attention", "ascend")]


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("past,new", [PAST["prefill"], PAST["mixed"]], ids=["prefill", "mixed"])
def test_prompts_over_pages(chip, past, new, spec, codes):
    generator = fresh_generator()
    if codes:
        pages, tables = filled_codes(past, new, 16, 64, generator)
        held = [p.dequantized().to(HALF) for p in pages]
    else:
        *pages, table, lengths, starts = filled(past, new, 16, 64, HALF, generator)
        held, tables = pages, (table, lengths, starts)
    q = torch.randn(sum(new), 6, 64, generator=generator).to(HALF)
    golden, _ = paged_attention_reference(q.double(), *(p.double() for p in held), *tables, spec)
    plain = summation_orders(lambda order=None: plain_paged_attention(q, *held, *tables, spec, order=order))
    out, _ = on_npu(paged_attention)(q, *pages, *tables, spec, strategy="ascend")
    assert_parity(out, golden, plain, reduction=200)
    assert chip.log.names.count(PROMPT) == sum(count > 0 for count in new)


def test_a_prompt_over_a_cache_waits_for_nothing(chip):
    cache = KVCacheManager(300, 16, 1, 4, 64, HALF, num_kv_heads=2, num_pages=40, device=DEVICE)
    cache.begin(2)
    q, k = torch.randn(18, 4, 64).half().to(DEVICE), torch.randn(18, 2, 64).half().to(DEVICE)
    step = cache.step(9)
    cache_append(k, k, *cache.pages(0), step.slots(0), trusted=True)
    with chip.forbid_host_sync(), record_choices() as choices:
        where = (step.block_table(0), step.kv_lengths, step.cu_seqlens_q)
        paged_attention(q, *cache.pages(0), *where, CAUSAL, trusted=True)
    assert list(choices) == [("paged_attention", "ascend")]


ops = torch.ops.npu
Q, KV = (1, 2, 128, 32), (1, 2, 128, 32)
FAR = {"next_tokens": 2147483647}


def hidden(*shape):
    return torch.zeros(shape, dtype=torch.bool)


#: changes of a call that the documentation forbids, and its rule
FORBIDDEN = {
    "bfloat16": ({"dtype": torch.bfloat16}, {}, "query is torch.bfloat16"),
    "grouped heads": ({"kv": (1, 1, 128, 32)}, {"num_key_value_heads": 1}, "num_key_value_heads is 1; 0 alone"),
    "a mode": ({}, {"sparse_mode": 3}, "sparse_mode is 3; 0 alone"),
    "a window": ({}, {"pre_tokens": 5}, "tokens are 5"),
    "a batch": ({"q": (129, 1, 1, 16), "kv": (129, 1, 1, 16)}, {"num_heads": 1}, "B is 129; at most 128"),
    "a length": ({"q": (1, 1, 65536, 16), "kv": (1, 1, 16, 16)}, {"num_heads": 1}, "S is 65536; at most 65535"),
    "a mask of numbers": ({}, {"atten_mask": hidden(128, 128).byte()}, "bool alone on 310P"),
    "a mask of unequal lengths": ({"q": (1, 2, 256, 32)}, {"atten_mask": hidden(256, 128)}, "equal multiples of 128"),
    "a mask of odd lengths": (
        {"q": (1, 2, 96, 32), "kv": (1, 2, 96, 32)},
        {"atten_mask": hidden(96, 96)},
        "equal multiples of 128",
    ),
    "a mask of heads": ({}, {"atten_mask": hidden(1, 2, 128, 128)}, "atten_mask has shape"),
    "the default of next_tokens": ({}, {"atten_mask": hidden(128, 128), "next_tokens": 0}, "shows pairs outside"),
    "channels": ({"q": (1, 2, 128, 24), "kv": (1, 2, 128, 24)}, {}, "D is 24; a multiple of 16"),
    "more channels": ({"q": (1, 2, 128, 528), "kv": (1, 2, 128, 528)}, {}, "D is 528"),
    "values of another size": ({"v": (1, 2, 128, 16)}, {}, "one shape"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_the_documentation_forbids_is_refused(name):
    changes, said, rule = FORBIDDEN[name]
    dtype = changes.get("dtype", HALF)
    kv = changes.get("kv", KV)
    q, k, v = (torch.ones(shape, dtype=dtype).to(DEVICE) for shape in (changes.get("q", Q), kv, changes.get("v", kv)))
    call = {"num_heads": 2, "input_layout": "BNSD", **FAR, **said}
    call = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    with pytest.raises(OperatorError, match=rule):
        ops.npu_prompt_flash_attention(q, k, v, **call)


@pytest.mark.parametrize("chip", ["ascend910b1", "ascend910_93"], indirect=True)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("mode,spec", [(2, AttentionSpec(causal="top_left")), (3, CAUSAL), (0, AttentionSpec())])
def test_the_training_chips_take_more(chip, triangle, mode, spec, layout):
    """Modes and grouped heads, against attention written out."""
    q, k, v = drawn(fresh_generator(), 2, 4, 2, 5, 9, 32)
    given = [t if layout == "BNSD" else t.transpose(1, 2).contiguous() for t in (q, k, v)]
    given = [t.flatten(2) if layout == "BSH" else t for t in given]
    out = ops.npu_prompt_flash_attention(
        *(t.to(DEVICE) for t in given), num_heads=4, num_key_value_heads=2, input_layout=layout, sparse_mode=mode,
        scale_value=32**-0.5, atten_mask=triangle.to(DEVICE) if mode else None,
    ).cpu()  # fmt: skip
    out = out.unflatten(-1, (4, -1)) if layout == "BSH" else out
    out = out if layout == "BNSD" else out.transpose(1, 2)
    assert_near(out, attention_reference(q.double(), k.double(), v.double(), spec)[0])


@pytest.mark.parametrize("chip", ["ascend950"], indirect=True)
def test_the_950_has_it_no_longer(chip):
    """As torch_npu's host code says there, and of the attention with sinks, too."""
    q = torch.ones(1, 2, 128, 32, dtype=HALF).to(DEVICE)
    with pytest.raises(OperatorError, match="no longer supported on Ascend950"):
        ops.npu_prompt_flash_attention(q, q, q, num_heads=2, input_layout="BNSD")
    with pytest.raises(OperatorError, match="npu_fusion_attention_v3 is not supported on Ascend950"):
        ops.npu_fusion_attention_v3(q, q, q, 2, "BNSD", sink=torch.zeros(2).to(DEVICE))


#: a slip in our call -> parity is red, or the call is refused
FAULTS = {
    "mask polarity": lambda c: {"atten_mask": ~c["atten_mask"]},
    "no mask": lambda c: {"atten_mask": None},
    "missing scale": lambda c: {"scale_value": 1.0},
    "scale of the padded channels": lambda c: {"scale_value": c["query"].shape[-1] ** -0.5},
    "padded keys are seen": lambda c: {"atten_mask": torch.zeros_like(c["atten_mask"])},
    "the default of next_tokens": lambda c: {"next_tokens": 0},
    "key heads tiled": lambda c: {"key": c["key"].flip(1).contiguous()},
    "BSND for BNSD": lambda c: {"input_layout": "BSND"},
    "grouped heads": lambda c: {"num_key_value_heads": 3},
}


@pytest.mark.parametrize("name", ["nothing", *FAULTS])
def test_planted_faults(name):
    q, k, v = drawn(fresh_generator(), 2, 6, 3, 40, 57, 24)
    spec = AttentionSpec(window=(20, 20))
    want, _ = attention_reference(q.double(), k.double(), v.double(), spec)
    tampered = Tampered(PROMPT, FAULTS.get(name, lambda c: {}), soc="ascend310p")
    red = contextlib.nullcontext() if name == "nothing" else pytest.raises((AssertionError, OperatorError))
    with tampered, red:
        out, _ = on_npu(attention)(q, k, v, spec, strategy="ascend")
        assert_near(out, want)
    assert tampered.hits == 1


def test_gradients_are_refused_with_their_reason():
    q, k, v = (t.to(DEVICE).requires_grad_() for t in drawn(fresh_generator(), 1, 2, 2, 4, 4, 16))
    for more in itertools.chain(({},), ({"return_lse": True},)):
        with pytest.raises(ValueError, match="npu_fusion_attention does not run on Ascend310P3"):
            attention(q, k, v, CAUSAL, strategy="ascend", **more)

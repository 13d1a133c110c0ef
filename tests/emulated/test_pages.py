"""Writing a paged cache, and ATB's attention of a decode step over it."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import EmulatedNPU, OperatorError

from .helpers import DEVICE, assert_near, draw
from .test_fusion_attention import truth
from .test_infer_attention import pages_of

ops, atb = torch.ops.npu, torch.ops.atb


def write_with(name, key, value, k_cache, v_cache, slots):
    if name == "atb":
        atb._npu_reshape_and_cache(key, value, k_cache, v_cache, slots)
    else:
        ops.npu_scatter_pa_kv_cache(key, value, k_cache, v_cache, slots, cache_mode=name)


@pytest.mark.parametrize("name", ["atb", "Norm", None])
def test_tokens_go_to_their_slots(npu, name):
    generator = fresh_generator()
    key, value = draw(generator, 5, 2, 16, dtype=torch.half), draw(generator, 5, 2, 16, dtype=torch.half)
    caches = [draw(generator, 3, 16, 2, 16, dtype=torch.half) for _ in range(2)]
    slots = torch.randperm(48, generator=generator)[:5].int()
    k_cache, v_cache = (c.to(DEVICE) for c in caches)
    write_with(name, key.to(DEVICE), value.to(DEVICE), k_cache, v_cache, slots.to(DEVICE))
    for cache, before, source in ((k_cache, caches[0], key), (v_cache, caches[1], value)):
        want = before.clone()
        for token, slot in enumerate(slots.tolist()):
            want[slot // 16, slot % 16] = source[token]
        assert torch.equal(cache.cpu(), want)


def test_padding_slots_write_nothing(npu):
    generator = fresh_generator()
    key = draw(generator, 3, 2, 16, dtype=torch.half)
    cache = torch.zeros(2, 16, 2, 16, dtype=torch.half, device=DEVICE)
    slots = torch.tensor([4, -1, -1], dtype=torch.int32)
    atb._npu_reshape_and_cache(key.to(DEVICE), key.to(DEVICE), cache, cache.clone(), slots.to(DEVICE))
    assert (cache.cpu().flatten(0, 1).abs().sum((1, 2)) > 0).nonzero().tolist() == [[4]]


def test_the_default_mode_is_another_memory(npu):
    """PA_NZ, the default, has channels in groups of 32 bytes outside of the tokens of a block."""
    generator = fresh_generator()
    key = draw(generator, 2, 2, 32, dtype=torch.half)
    cache = torch.zeros(3, 4, 16, 16, dtype=torch.half, device=DEVICE)
    ops.npu_scatter_pa_kv_cache(
        key.to(DEVICE), key.to(DEVICE), cache, cache.clone(), torch.tensor([5, 33], dtype=torch.int32, device=DEVICE)
    )
    for token, (block, row) in enumerate([(0, 5), (2, 1)]):
        assert torch.equal(cache[block, :, row].flatten().cpu(), key[token].flatten())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("version", [1, 2])
def test_paged_attention(npu, dtype, block_size, version):
    generator = fresh_generator()
    lengths = [block_size + 1, 3, 0]
    keys, values = ([draw(generator, 2, n, 16, dtype=dtype) for n in lengths] for _ in range(2))
    state = generator.get_state()
    k_pages, table = pages_of(keys, block_size, generator)
    generator.set_state(state)
    v_pages, _ = pages_of(values, block_size, generator)
    k_pages, v_pages = (p.transpose(1, 2).contiguous() for p in (k_pages, v_pages))
    q = draw(generator, 3, 6, 16, dtype=dtype)
    out = torch.empty(3, 6, 16, dtype=dtype, device=DEVICE)
    tensors = [t.to(DEVICE) for t in (q, k_pages, v_pages, table)]
    if version == 1:
        query, pages_k, pages_v, blocks = tensors
        lens = torch.tensor(lengths, dtype=torch.int32)
        atb._npu_paged_attention(query, pages_k, pages_v, 2, 6, 0.3, blocks, lens, out)
    else:
        query, pages_k, pages_v, blocks = tensors
        atb._npu_paged_attention_v2(
            query, pages_k, blocks, lengths, value_cache=pages_v, num_kv_heads=2, num_heads=6, scale_value=0.3, out=out
        )
    for place, length in enumerate(lengths):
        parts = q[place][None, :, None], keys[place][None], values[place][None]
        want, _ = truth(*(t.double() for t in parts), torch.ones(1, length, dtype=torch.bool), 0.3)
        assert_near(out[place], want[0, :, 0])


def latent_case(generator, dtype=torch.bfloat16):
    lengths = [40, 7]
    latents, ropes = ([draw(generator, 1, n, width, dtype=dtype) * 0.1 for n in lengths] for width in (512, 64))
    state = generator.get_state()
    latent_pages, table = pages_of(latents, 32, generator)
    generator.set_state(state)
    rope_pages, _ = pages_of(ropes, 32, generator)
    q, q_rope = (draw(generator, 2, 4, width, dtype=dtype) for width in (512, 64))
    want, lse = [], []
    for place in range(2):
        query = torch.cat((q, q_rope), -1)[place][None, :, None].double()
        key = torch.cat((latents[place], ropes[place]), -1)[None].double()
        visible = torch.ones(1, lengths[place], dtype=torch.bool)
        one, its_lse = truth(query, key, latents[place][None].double(), visible, 0.2)
        want.append(one[0, :, 0])
        lse.append(its_lse[0])
    pages = [p.transpose(1, 2).contiguous() for p in (latent_pages, rope_pages)]
    return q, q_rope, *pages, table, lengths, torch.stack(want), torch.stack(lse)


def test_latent_attention(npu):
    q, q_rope, latent, rope, table, lengths, want, lse = latent_case(fresh_generator())
    tensors = [t.to(DEVICE) for t in (q, q_rope, latent, rope, table)]
    assert_near(atb.npu_multi_head_latent_attention(*tensors, lengths, 4, 0.2, 1), want)
    out, its_lse = atb.npu_multi_head_latent_attention(*tensors, lengths, 4, 0.2, 1, True)
    assert_near(out, want)
    assert_near(its_lse, lse)


def test_paged_attention_over_one_latent_cache(npu):
    q, q_rope, latent, rope, table, lengths, want, _ = latent_case(fresh_generator())
    out = torch.empty(2, 4, 512, dtype=q.dtype, device=DEVICE)
    query, cache = torch.cat((q, q_rope), -1), torch.cat((latent, rope), -1)
    lens = torch.tensor(lengths, dtype=torch.int32)
    atb._npu_paged_attention_mla(query.to(DEVICE), cache.to(DEVICE), 1, 4, 0.2, table.to(DEVICE), lens, 512, out)
    assert_near(out, want)


# ---- what the documentation forbids


def make(*shape, dtype=torch.half):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def attend(q=None, k=None, v=None, kv_heads=2, heads=4, table=None, lens=None, out=None):
    q = make(3, 4, 16) if q is None else q
    k = make(5, 128, 2, 16) if k is None else k
    table = make(3, 2, dtype=torch.int32) if table is None else table
    lens = torch.ones(3, dtype=torch.int32) if lens is None else lens
    atb._npu_paged_attention(
        q, k, k if v is None else v, kv_heads, heads, 1.0, table, lens, make(3, 4, 16) if out is None else out
    )


def scatter(slots=(1, 2), key=None, cache=None, mode="Norm"):
    key = make(2, 2, 16) if key is None else key
    cache = make(3, 16, 2, 16) if cache is None else cache
    slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    ops.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode=mode)


def reshape(slots=(1, 2), dtype=torch.int32, cache=None):
    cache = make(3, 16, 2, 16) if cache is None else cache
    slots = torch.tensor(slots, dtype=dtype, device=DEVICE)
    atb._npu_reshape_and_cache(make(2, 2, 16), make(2, 2, 16), cache, cache.clone(), slots)


FORBIDDEN = {
    "float32": (lambda: attend(make(3, 4, 16, dtype=torch.float32)), "float16, bfloat16"),
    "block size 24": (lambda: attend(k=make(5, 24, 2, 16)), "multiple of 16 up to 256"),
    "block size 512": (lambda: attend(k=make(5, 512, 2, 16)), "multiple of 16 up to 256"),
    "wide heads and blocks": (lambda: attend(make(3, 4, 272), make(5, 256, 2, 272)), "must not exceed 128"),
    "too wide heads": (lambda: attend(make(3, 4, 592), make(5, 16, 2, 592)), "at most 576"),
    "heads": (lambda: attend(heads=5), "num_heads 5"),
    "kv heads": (lambda: attend(kv_heads=1), "num_kv_heads 1 in axis 2"),
    "ratio of heads": (lambda: attend(k=make(5, 128, 3, 16), kv_heads=3), "no multiple"),
    "lengths on the device": (lambda: attend(lens=make(3, dtype=torch.int32)), "must be on the host"),
    "int64 lengths": (lambda: attend(lens=torch.ones(3, dtype=torch.int64)), "int32"),
    "lengths beyond the table": (lambda: attend(lens=torch.full((3,), 300, dtype=torch.int32)), "too few columns"),
    "int64 table": (lambda: attend(table=make(3, 2, dtype=torch.int64)), "block_table is torch.int64"),
    "table on the host": (lambda: attend(table=torch.ones(3, 2, dtype=torch.int32)), "must be on the device"),
    "shape of out": (lambda: attend(out=make(3, 4, 8)), "out has shape"),
    "repeated slot": (lambda: scatter((3, 3)), "must be unique"),
    "slot out of range": (lambda: scatter((3, 48)), r"outside \[0, 47\]"),
    "negative slot": (lambda: scatter((3, -1)), r"outside \[0, 47\]"),
    "default mode with plain pages": (lambda: scatter(mode="PA_NZ"), "'PA_NZ' takes"),
    "unknown mode": (lambda: scatter(mode="ND"), "cache_mode is 'ND'"),
    "dtype of the cache": (lambda: scatter(cache=make(3, 16, 2, 16, dtype=torch.bfloat16)), "dtypes must be the same"),
    "keys not contiguous": (lambda: scatter(key=make(2, 2, 32)[..., ::2]), "not contiguous"),
    "repeated slot of ATB": (lambda: reshape((3, 3)), "must be unique"),
    "int64 slots of ATB": (lambda: reshape(dtype=torch.int64), "int32"),
    "heads of the cache": (lambda: reshape(cache=make(3, 16, 1, 16)), "the cache holds"),
    "prefill over pages of 64": (
        lambda: atb._npu_flash_attention_qlens(
            make(3, 4, 16), *[make(5, 64, 2, 16)] * 2, make(3, 2, dtype=torch.int32), make(128, 128),
            *[torch.ones(3, dtype=torch.int32, device=DEVICE)] * 2, 2, 4, 1.0, make(3, 4, 16),
        ),
        "silently wrong",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_calls(npu, name):
    invoke, rule = FORBIDDEN[name]
    with pytest.raises(OperatorError, match=rule):
        invoke()


def test_rules_of_310p():
    with EmulatedNPU(soc="ascend310p"):
        attend(make(3, 4, 128), make(5, 128, 2, 128), out=make(3, 4, 128))
        with pytest.raises(OperatorError, match="at most 16384 on 310P"):
            attend(make(3, 4, 256), make(5, 128, 2, 256), out=make(3, 4, 256))
        with pytest.raises(OperatorError, match="bfloat16, which this SoC lacks"):
            attend(make(3, 4, 16, dtype=torch.bfloat16), make(5, 128, 2, 16, dtype=torch.bfloat16))

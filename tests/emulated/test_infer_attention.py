"""The fused attention of inference against attention written out in float64: layouts, lengths, pages, masks, traps."""

from __future__ import annotations

import pytest
import torch

from atb_modules.testing import fresh_generator
from atb_modules.testing.npu import EmulatedNPU, OperatorError

from .helpers import DEVICE, assert_near, draw
from .test_fusion_attention import band, bnsd_to, truth

HALVES = [torch.float16, torch.bfloat16]
ops = torch.ops.npu


def fia(q, k, v, heads, kv_heads, **more):
    call = {"num_query_heads": heads, "num_key_value_heads": kv_heads, "softmax_scale": 0.3, **more}
    return ops.npu_fused_infer_attention_score_v2(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), **call)


def everything(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"])
def test_layouts(npu, dtype, rows, layout):
    generator = fresh_generator()
    source, _, target = layout.partition("_")
    dense = [draw(generator, *s, dtype=dtype) for s in ((2, 6, rows, 16), (2, 3, 9, 16), (2, 3, 9, 16))]
    if layout == "BNSD_BSND" and rows == 1:
        with pytest.raises(OperatorError, match="Q_S > 1 only"):
            fia(*dense, 6, 3, input_layout=layout)
        return
    given = [bnsd_to(t, source) for t in dense]
    out, lse = fia(*given, 6, 3, input_layout=layout, return_softmax_lse=True)
    want, want_lse = truth(*(t.double() for t in dense), everything(rows, 9), 0.3)
    want = want.transpose(0, 1) if target == "NBSD" else bnsd_to(want, target or source)
    assert_near(out, want)
    assert_near(lse[..., 0], want_lse, torch.float16)


@pytest.mark.parametrize(
    "mode, tokens, visible",
    [
        (2, {}, lambda r, c: everything(r, c).tril()),
        (3, {}, lambda r, c: band(r, c, 99, 0)),
        (4, {"pre_tokens": 3, "next_tokens": 0}, lambda r, c: band(r, c, 3, 0)),
        (4, {"pre_tokens": 1, "next_tokens": 2}, lambda r, c: band(r, c, 1, 2)),
    ],
)
def test_modes_follow_the_valid_lengths(npu, triangle, mode, tokens, visible):
    generator = fresh_generator()
    q, k, v = (draw(generator, *s, dtype=torch.half) for s in ((2, 4, 6, 16), (2, 2, 9, 16), (2, 2, 9, 16)))
    out, lse = fia(
        q, k, v, 4, 2, input_layout="BNSD", sparse_mode=mode, atten_mask=triangle.to(DEVICE), inner_precise=2,
        actual_seq_qlen=[6, 3], actual_seq_kvlen=[9, 5], return_softmax_lse=True, **tokens,
    )  # fmt: skip
    for place, (rows, columns) in enumerate([(6, 9), (3, 5)]):
        shown = visible(rows, columns)
        parts = q[place, None, :, :rows], k[place, None, :, :columns], v[place, None, :, :columns]
        want, want_lse = truth(*(t.double() for t in parts), shown, 0.3)
        assert_near(out[place, :, :rows], want[0])
        seen = shown.any(-1)
        assert_near(lse[place, :, :rows, 0][:, seen], want_lse[0][:, seen], torch.float16)
    assert out[1, :, 3:].isnan().all(), "rows beyond the valid length are unwritten"


@pytest.mark.parametrize("shape", [(5, 9), (1, 5, 9), (2, 1, 5, 9), (1, 1, 16, 16)])
def test_full_masks_hide_what_is_true(npu, shape):
    generator = fresh_generator()
    dense = [draw(generator, *s, dtype=torch.half) for s in ((2, 4, 5, 16), (2, 4, 9, 16), (2, 4, 9, 16))]
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden[..., 0] = False
    for mode in (0, 1):
        out, _ = fia(*dense, 4, 4, input_layout="BNSD", sparse_mode=mode, atten_mask=hidden.to(DEVICE))
        shown = ~hidden[..., :5, :9]
        want, _ = truth(*(t.double() for t in dense), shown if shown.dim() != 3 else shown[None], 0.3)
        assert_near(out, want)


def test_a_mask_of_one_query(npu):
    generator = fresh_generator()
    dense = [draw(generator, *s, dtype=torch.half) for s in ((2, 4, 1, 16), (2, 4, 9, 16), (2, 4, 9, 16))]
    hidden = torch.rand(2, 9, generator=generator) < 0.4
    hidden[:, 0] = False
    out, _ = fia(*dense, 4, 4, input_layout="BNSD", atten_mask=hidden.to(DEVICE))
    assert_near(out, truth(*(t.double() for t in dense), ~hidden[:, None, None], 0.3)[0])


def test_the_mode_is_ignored_for_one_query(npu):
    generator = fresh_generator()
    dense = [draw(generator, *s, dtype=torch.half) for s in ((1, 2, 1, 16), (1, 2, 9, 16), (1, 2, 9, 16))]
    out, _ = fia(*dense, 2, 2, input_layout="BNSD", sparse_mode=4, pre_tokens=1, next_tokens=0)
    assert_near(out, truth(*(t.double() for t in dense), everything(1, 9), 0.3)[0])


def pages_of(sequences, block_size, generator, extra=3):
    """Pages (blocks, kv heads, block_size, D) in random order, and the block table, of (kv heads, length, D)."""
    counts = [-(-s.shape[1] // block_size) for s in sequences]
    order = torch.randperm(sum(counts) + extra, generator=generator)
    heads, _, width = sequences[0].shape
    pages = torch.full((len(order), heads, block_size, width), 7.0, dtype=sequences[0].dtype)
    table = torch.full((len(sequences), max(counts)), -1, dtype=torch.int32)
    used = 0
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        for place in range(count):
            block = int(order[used])
            used += 1
            piece = sequence[:, place * block_size : (place + 1) * block_size]
            pages[block, :, : piece.shape[1]] = piece
            table[row, place] = block
    return pages, table


def flat(pages):
    """(blocks, block_size, H)"""
    return pages.transpose(1, 2).flatten(2).contiguous()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows, block_size", [(1, 16), (1, 32), (1, 128), (1, 512), (5, 128), (5, 384)])
def test_pages(npu, triangle, rows, block_size, wide):
    generator = fresh_generator()
    lengths = [block_size + 3, 7, 2 * block_size]
    keys, values = ([draw(generator, 2, n, 16, dtype=torch.half) for n in lengths] for _ in range(2))
    state = generator.get_state()
    k_pages, table = pages_of(keys, block_size, generator)
    generator.set_state(state)
    v_pages, _ = pages_of(values, block_size, generator)
    q = draw(generator, 3, 4, rows, 16, dtype=torch.half)
    mask = {"sparse_mode": 3, "atten_mask": triangle.to(DEVICE)} if rows > 1 else {}
    shaped = (lambda t: t) if wide else flat
    out, lse = fia(
        q, shaped(k_pages), shaped(v_pages), 4, 2, input_layout="BNSD", block_table=table.to(DEVICE),
        block_size=block_size, actual_seq_kvlen=lengths, return_softmax_lse=True, **mask,
    )  # fmt: skip
    for place, length in enumerate(lengths):
        parts = q[place, None], keys[place][None], values[place][None]
        want, want_lse = truth(*(t.double() for t in parts), band(rows, length, 10**6, 0), 0.3)
        assert_near(out[place], want[0])
        assert_near(lse[place, ..., 0], want_lse[0], torch.float16)


def test_a_wrong_block_reads_nan(npu):
    generator = fresh_generator()
    pages, table = pages_of([draw(generator, 1, 20, 16, dtype=torch.half)], 16, generator)
    table[0, 1] = pages.shape[0] + 4
    q = draw(generator, 1, 1, 1, 16, dtype=torch.half)
    out, _ = fia(
        q, pages, pages, 1, 1, input_layout="BNSD", block_table=table.to(DEVICE), block_size=16, actual_seq_kvlen=[20]
    )
    assert out.isnan().all()


@pytest.mark.parametrize("layout", ["TND", "NTD_TND"])
@pytest.mark.parametrize("mode", [0, 3, 4])
def test_packed_sequences(npu, triangle, layout, mode):
    generator = fresh_generator()
    lengths_q, lengths_kv = [3, 5, 1], [4, 5, 6]
    q = draw(generator, 9, 4, 128, dtype=torch.bfloat16)
    k, v = (draw(generator, 15, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    given = [t.transpose(0, 1).contiguous() if layout == "NTD_TND" else t for t in (q, k, v)]
    more = {"sparse_mode": mode, "atten_mask": triangle.to(DEVICE)} if mode else {}
    if mode == 4:
        more |= {"pre_tokens": 2, "next_tokens": 0}
    out, lse = fia(
        *given, 4, 2, input_layout=layout, actual_seq_qlen=[3, 8, 9], actual_seq_kvlen=[4, 9, 15],
        return_softmax_lse=True, **more,
    )  # fmt: skip
    start_q = start_k = 0
    for rows, columns in zip(lengths_q, lengths_kv, strict=True):
        parts = [t[start : start + n].transpose(0, 1)[None].double() for t, start, n in
                 ((q, start_q, rows), (k, start_k, columns), (v, start_k, columns))]  # fmt: skip
        visible = {0: everything(rows, columns), 3: band(rows, columns, 99, 0), 4: band(rows, columns, 2, 0)}[mode]
        want, want_lse = truth(*parts, visible, 0.3)
        assert_near(out[start_q : start_q + rows], want[0].transpose(0, 1))
        assert_near(lse[start_q : start_q + rows, :, 0], want_lse[0].t(), torch.float16)
        start_q, start_k = start_q + rows, start_k + columns


def test_packed_queries_over_pages_take_plain_key_lengths(npu, triangle):
    generator = fresh_generator()
    lengths_q, lengths_kv = [3, 1], [140, 9]
    keys = [draw(generator, 2, n, 128, dtype=torch.bfloat16) for n in lengths_kv]
    pages, table = pages_of(keys, 128, generator)
    q = draw(generator, 4, 4, 128, dtype=torch.bfloat16)
    out, _ = fia(
        q, pages, pages, 4, 2, input_layout="TND", sparse_mode=3, atten_mask=triangle.to(DEVICE), block_size=128,
        block_table=table.to(DEVICE), actual_seq_qlen=[3, 4], actual_seq_kvlen=lengths_kv,
    )  # fmt: skip
    for place, piece in enumerate((q[:3], q[3:])):
        rows = lengths_q[place]
        parts = piece.transpose(0, 1)[None].double(), *[keys[place][None].double()] * 2
        want, _ = truth(*parts, band(rows, lengths_kv[place], 10**6, 0), 0.3)
        assert_near(out[:3] if place == 0 else out[3:], want[0].transpose(0, 1))


def test_sink(npu, triangle):
    generator = fresh_generator()
    q, k, v = (draw(generator, *s, dtype=torch.bfloat16) for s in ((3, 4, 128), (5, 2, 128), (5, 2, 128)))
    sink = draw(generator, 4, dtype=torch.bfloat16)
    out, _ = fia(
        q, k, v, 4, 2, input_layout="TND", sparse_mode=3, atten_mask=triangle.to(DEVICE),
        learnable_sink=sink.to(DEVICE), actual_seq_qlen=[3], actual_seq_kvlen=[5],
    )  # fmt: skip
    parts = [t.transpose(0, 1)[None].double() for t in (q, k, v)]
    assert_near(out, truth(*parts, band(3, 5, 99, 0), 0.3, sink=sink.double())[0][0].transpose(0, 1))


@pytest.mark.parametrize("rows", [1, 3])
def test_latent_attention(npu, triangle, rows):
    """D 512 with 64 rotary channels beside it, over pages: the values are the latent."""
    generator = fresh_generator()
    lengths = [130, 5]
    latents, ropes = (
        [draw(generator, 1, n, width, dtype=torch.bfloat16) * 0.1 for n in lengths] for width in (512, 64)
    )
    state = generator.get_state()
    k_pages, table = pages_of(latents, 128, generator)
    generator.set_state(state)
    r_pages, _ = pages_of(ropes, 128, generator)
    q, q_rope = (draw(generator, 2, 4, rows, width, dtype=torch.bfloat16) for width in (512, 64))
    mask = {"sparse_mode": 3, "atten_mask": triangle.to(DEVICE)} if rows > 1 else {}
    out, _ = fia(
        q, k_pages, k_pages, 4, 1, input_layout="BNSD", query_rope=q_rope.to(DEVICE), key_rope=r_pages.to(DEVICE),
        block_table=table.to(DEVICE), block_size=128, actual_seq_kvlen=lengths, **mask,
    )  # fmt: skip
    for place, length in enumerate(lengths):
        query = torch.cat((q, q_rope), -1)[place, None].double()
        key = torch.cat((latents[place], ropes[place]), -1)[None].double()
        want, _ = truth(query, key, latents[place][None].double(), band(rows, length, 10**6, 0), 0.3)
        assert_near(out[place], want[0])


# ---- what surprises


def test_rows_without_effect(npu):
    generator = fresh_generator()
    dense = [draw(generator, *s, dtype=torch.half) for s in ((1, 2, 4, 16), (1, 2, 6, 16), (1, 2, 6, 16))]
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[1] = True
    call = {"input_layout": "BNSD", "atten_mask": hidden.to(DEVICE), "return_softmax_lse": True}
    careless, lse = fia(*dense, 2, 2, **call)
    assert_near(careless[:, :, 1], dense[2].double().mean(2))
    careful, _ = fia(*dense, 2, 2, inner_precise=2, **call)
    assert (careful[:, :, 1].cpu() == 0).all()
    assert (lse[:, :, 1].cpu() == float("inf")).all(), "a merge that trusts this LSE must show"


def test_empty_keys_give_zeros(npu):
    generator = fresh_generator()
    q, k = draw(generator, 2, 2, 1, 16, dtype=torch.half), draw(generator, 2, 2, 6, 16, dtype=torch.half)
    out, _ = fia(q, k, k, 2, 2, input_layout="BNSD", actual_seq_kvlen=[6, 0])
    assert (out[1].cpu() == 0).all() and out[0].abs().max() > 0


def test_no_lse_is_an_empty_tensor(npu):
    q = torch.ones(1, 2, 1, 16, dtype=torch.half)
    assert fia(q, q, q, 2, 2, input_layout="BNSD")[1].numel() == 0


# ---- what the documentation forbids


def make(*shape, dtype=torch.half):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def call(q=None, k=None, heads=4, kv_heads=2, layout="BNSD", **more):
    q = make(2, 4, 5, 16) if q is None else q
    k = make(2, 2, 6, 16) if k is None else k
    return ops.npu_fused_infer_attention_score_v2(
        q, k, k, num_query_heads=heads, num_key_value_heads=kv_heads, input_layout=layout, **more
    )


def paged(rows=1, block_size=128, blocks=4, table=None, pages=None, layout="BNSD", **more):
    table = make(2, 2, dtype=torch.int32) if table is None else table
    more = {"actual_seq_kvlen": [7, 9], **more}
    pages = make(blocks, block_size, 32) if pages is None else pages
    q = make(2, 4, rows, 16) if layout == "BNSD" else make(2, rows, 4, 16)
    return call(q, pages, layout=layout, block_table=table, block_size=block_size, **more)


def packed(dtype=torch.bfloat16, width=128, **more):
    more = {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [4, 6], **more}
    return call(make(5, 4, width, dtype=dtype), make(6, 2, width, dtype=dtype), layout="TND", **more)


def compressed():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(DEVICE)


FORBIDDEN = {
    "float32": (lambda: call(make(2, 4, 5, 16, dtype=torch.float32)), "float16, bfloat16"),
    "unknown layout": (lambda: call(layout="SBH"), "input_layout is 'SBH'"),
    "heads of the shape": (lambda: call(heads=5), "query has 4 heads"),
    "ratio of heads": (lambda: call(kv_heads=3), "no multiple"),
    "ratio above 64": (lambda: call(make(1, 128, 1, 16), make(1, 1, 6, 16), 128, 1), "at most 64"),
    "more than 256 heads": (lambda: call(make(1, 512, 1, 16), make(1, 8, 6, 16), 512, 8), "at most 256"),
    "wide heads": (lambda: call(make(1, 4, 1, 528), make(1, 2, 6, 528)), "at most 512"),
    "unaligned head dim": (lambda: call(make(2, 4, 5, 24), make(2, 2, 6, 24)), "multiple of 16"),
    "wide BSH": (lambda: call(make(1, 2, 65536), make(1, 3, 65536), 128, 128, "BSH"), "below 65535"),
    "not contiguous": (lambda: call(make(2, 5, 4, 16).transpose(1, 2)), "not contiguous"),
    "mode 2 without the mask": (lambda: call(sparse_mode=2), "needs atten_mask"),
    "mode 3 without the mask": (lambda: call(sparse_mode=3), "needs atten_mask"),
    "mode 4 with a full mask": (
        lambda: call(sparse_mode=4, atten_mask=make(5, 6).bool()),
        r"takes atten_mask \(2048, 2048\)",
    ),
    "the other polarity": (lambda: call(sparse_mode=3, atten_mask=~compressed()), "above the diagonal"),
    "mode 1 without a mask": (lambda: call(sparse_mode=1), "needs atten_mask"),
    "mode 5": (lambda: call(sparse_mode=5), "0 to 4"),
    "float mask": (lambda: call(atten_mask=make(5, 6)), "bool, int8 or uint8"),
    "small mask": (lambda: call(atten_mask=make(5, 5).bool()), "atten_mask has shape"),
    "inner_precise of one query": (lambda: call(make(2, 4, 1, 16), inner_precise=2), "0 or 1"),
    "lengths beyond the room": (lambda: call(actual_seq_kvlen=[6, 12]), "are these cumulative"),
    "too few lengths": (
        lambda: call(make(3, 4, 5, 16), make(3, 2, 6, 16), actual_seq_kvlen=[6, 6]),
        "2 entries for 3 sequences",
    ),
    "pages without lengths": (lambda: paged(actual_seq_kvlen=None), "actual_seq_kvlen is required"),
    "pages of 64 in a prefill": (lambda: paged(5, 64), "multiple of 128 from 128 to 512"),
    "pages of 640 in a prefill": (lambda: paged(5, 640), "multiple of 128 from 128 to 512"),
    "pages of 24": (lambda: paged(1, 24), "multiple of 16 up to 512"),
    "pages of 1024": (lambda: paged(1, 1024), "multiple of 16 up to 512"),
    "block size of the pages": (lambda: paged(pages=make(4, 64, 32)), "the pages hold 64"),
    "int64 table": (lambda: paged(table=make(2, 2, dtype=torch.int64)), "int32"),
    "rows of the table": (lambda: paged(table=make(3, 2, dtype=torch.int32)), "max_blocks"),
    "columns of the table": (lambda: paged(actual_seq_kvlen=[7, 300]), "there is room for 256"),
    "too few blocks": (lambda: paged(blocks=1), "1 blocks; the sequences have 2"),
    "pages by heads in BSND": (lambda: paged(pages=make(4, 2, 128, 16), layout="BSND"), "H. only"),
    "packed float16": (lambda: packed(torch.half), "bfloat16 only"),
    "packed head dim": (lambda: packed(width=64), "packed layouts take 128"),
    "packed without lengths": (lambda: packed(actual_seq_qlen=None), "needs actual_seq_qlen"),
    "packed lengths not cumulative": (lambda: packed(actual_seq_qlen=[3, 2]), "must be cumulative"),
    "packed mode 2": (lambda: packed(sparse_mode=2, atten_mask=compressed()), "3 .or 4. with it"),
    "packed mask without mode": (lambda: packed(atten_mask=make(3, 4).bool()), "0 without atten_mask"),
    "packed causal with more queries": (
        lambda: packed(sparse_mode=3, atten_mask=compressed(), actual_seq_kvlen=[1, 6]),
        "more queries than keys",
    ),
    "sink outside packed layouts": (
        lambda: call(learnable_sink=make(4, dtype=torch.bfloat16)),
        "TND and NTD_TND only",
    ),
    "float16 sink": (lambda: packed(learnable_sink=make(4)), "learnable_sink is torch.float16"),
    "latent without pages": (
        lambda: call(
            make(1, 4, 1, 512), make(1, 1, 6, 512), 4, 1,
            query_rope=make(1, 4, 1, 64), key_rope=make(1, 1, 6, 64),
        ),
        "needs pages",
    ),
    "one rope": (lambda: call(query_rope=make(2, 4, 5, 64)), "come together"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_calls(name):
    invoke, rule = FORBIDDEN[name]
    with EmulatedNPU(check_meta=False), pytest.raises(OperatorError, match=rule):
        invoke()


def test_310p_has_no_fused_infer_attention():
    with EmulatedNPU(soc="ascend310p"), pytest.raises(OperatorError, match="not among the products"):
        call()

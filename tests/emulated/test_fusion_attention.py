"""The fused attention of training against attention written out in float64: layouts, modes, statistics, traps."""

from __future__ import annotations

import math

import pytest
import torch

from atb_modules.testing import fresh_generator

from .helpers import DEVICE, assert_near, check_gradients, draw, in_float64, on_device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ops = torch.ops.npu


def truth(q, k, v, visible, scale, bias=None, sink=None):
    """(out, lse): q (B, N, Sq, D), k and v (B, Nkv, Skv, D) in float64, rows that see nothing give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    head = torch.arange(q.shape[1]) // group
    scores = torch.einsum("bnqd,bnkd->bnqk", q, k[:, head])
    scores = scale * (scores if bias is None else scores + bias)
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("bnqk,bnkd->bnqd", weights[..., : k.shape[2]], v[:, head]), lse


def bnsd_to(tensor, layout):
    if layout == "BNSD":
        return tensor
    flat = tensor.transpose(1, 2)
    if layout == "BSND":
        return flat.contiguous()
    return (flat if layout == "BSH" else flat.transpose(0, 1)).flatten(2).contiguous()


def band(rows, columns, before, after):
    """Visible pairs of a window counted from the bottom-right."""
    distance = torch.arange(columns)[None] - torch.arange(rows)[:, None] - (columns - rows)
    return (distance <= after) & (distance >= -before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_layouts(npu, triangle, dtype, layout):
    generator = fresh_generator()
    shapes = (2, 6, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16)
    dense = [draw(generator, *shape, dtype=dtype) for shape in shapes]
    leaves = on_device(*(bnsd_to(t, layout) for t in dense))
    wide = in_float64(*dense)
    out, top, total, *_ = ops.npu_fusion_attention(
        *leaves, 6, layout, scale=0.3, atten_mask=triangle.to(DEVICE), sparse_mode=3
    )
    want, lse = truth(*wide, band(5, 9, 99, 0), 0.3)
    assert_near(out, bnsd_to(want, layout))
    assert_near(top[..., 0] + total[..., 0].log(), lse, torch.float16)
    upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    out.backward(bnsd_to(upstream, layout).to(dtype).to(DEVICE))
    want.backward(upstream.to(dtype).double())
    for leaf, one in zip(leaves, wide, strict=True):
        assert_near(leaf.grad, bnsd_to(one.grad, layout), scale=3.0)


MODES = {
    "none": (0, {}, None, lambda r, c: torch.ones(r, c, dtype=torch.bool)),
    "left-up causal": (2, {}, "triangle", lambda r, c: torch.ones(r, c, dtype=torch.bool).tril()),
    "right-down causal": (3, {}, "triangle", lambda r, c: torch.ones(r, c, dtype=torch.bool).tril(c - r)),
    "band": (4, {"pre_tockens": 3, "next_tockens": 1}, "triangle", lambda r, c: band(r, c, 3, 1)),
    "window": (4, {"pre_tockens": 2, "next_tockens": 0}, "triangle", lambda r, c: band(r, c, 2, 0)),
}


@pytest.mark.parametrize("sizes", [(7, 7), (4, 11), (1, 6)])
@pytest.mark.parametrize("mode", MODES)
def test_modes(npu, triangle, mode, sizes):
    generator = fresh_generator()
    number, tokens, mask, visible = MODES[mode]
    rows, columns = sizes
    dense = [draw(generator, *shape) for shape in ((2, 4, rows, 8), (2, 2, columns, 8), (2, 2, columns, 8))]
    leaves, wide = on_device(*dense), in_float64(*dense)
    out = ops.npu_fusion_attention(
        *leaves, 4, "BNSD", scale=0.5, sparse_mode=number, atten_mask=triangle.to(DEVICE) if mask else None, **tokens
    )[0]
    want, _ = truth(*wide, visible(rows, columns), 0.5)
    assert_near(out, want)
    check_gradients([out], [want], leaves, wide, generator, scale=3.0)


@pytest.mark.parametrize("shape", [(5, 8), (1, 1, 5, 8), (2, 1, 5, 8), (2, 4, 5, 8)])
@pytest.mark.parametrize("mode", [0, 1])
def test_full_masks_hide_what_is_true(npu, mode, shape):
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((2, 4, 5, 8), (2, 4, 8, 8), (2, 4, 8, 8))]
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden[..., 0] = False
    out = ops.npu_fusion_attention(
        *(t.to(DEVICE) for t in dense), 4, "BNSD", scale=0.5, sparse_mode=mode, atten_mask=hidden.to(DEVICE)
    )[0]
    want, _ = truth(*in_float64(*dense), ~hidden, 0.5)
    assert_near(out, want)
    wrong, _ = truth(*in_float64(*dense), hidden, 0.5)
    assert (out.cpu().double() - wrong).abs().max() > 0.01, "the other polarity would give the same"


@pytest.mark.parametrize("mode", [5, 6])
def test_prefixes(npu, mode):
    generator = fresh_generator()
    rows, columns, prefix = 4, 7, [3, 5]
    dense = [draw(generator, *s) for s in ((2, 4, rows, 8), (2, 4, columns, 8), (2, 4, columns, 8))]
    visible = torch.stack([band(rows, columns, 99, 0) | (torch.arange(columns) < n) for n in prefix])[:, None]
    if mode == 5:
        mask = ~visible
    else:
        rectangle = torch.zeros(1024, 2048, dtype=torch.bool)
        rectangle[:, 1024:] = True
        mask = torch.cat((torch.ones(2048, 2048, dtype=torch.bool).triu(1), rectangle))
    out = ops.npu_fusion_attention(
        *(t.to(DEVICE) for t in dense),
        4,
        "BNSD",
        scale=0.5,
        sparse_mode=mode,
        atten_mask=mask.to(DEVICE),
        prefix=prefix,
    )[0]
    assert_near(out, truth(*in_float64(*dense), visible, 0.5)[0])


def packed(generator, lengths_q, lengths_kv, heads, kv_heads, dim):
    q = draw(generator, sum(lengths_q), heads, dim)
    k, v = (draw(generator, sum(lengths_kv), kv_heads, dim) for _ in range(2))
    return q, k, v


def cut(tensor, lengths):
    return [part.transpose(0, 1)[None] for part in tensor.split(lengths)]


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_packed_sequences(npu, triangle, softmax_layout):
    generator = fresh_generator()
    lengths_q, lengths_kv = [3, 0, 5, 2], [4, 0, 5, 6]
    tensors = packed(generator, lengths_q, lengths_kv, 4, 2, 8)
    leaves, wide = on_device(*tensors), in_float64(*tensors)
    out, top, total, *_ = ops.npu_fusion_attention(
        *leaves, 4, "TND", scale=0.4, sparse_mode=3, atten_mask=triangle.to(DEVICE), softmax_layout=softmax_layout,
        actual_seq_qlen=[3, 3, 8, 10], actual_seq_kvlen=[4, 4, 9, 15],
    )  # fmt: skip
    parts = [cut(t, n) for t, n in zip(wide, (lengths_q, lengths_kv, lengths_kv), strict=True)]
    wanted = [truth(q, k, v, band(q.shape[2], k.shape[2], 99, 0), 0.4) for q, k, v in zip(*parts, strict=True)]
    want = torch.cat([one[0][0].transpose(0, 1) for one in wanted])
    assert_near(out, want)
    lse = (top + total.log())[..., 0].cpu()
    if softmax_layout == "TND":
        assert_near(lse, torch.cat([one[1][0].t() for one in wanted]))
    else:  # the memory holds (heads, rows) of one sequence after the other, whatever the shape says
        assert_near(lse.flatten(), torch.cat([one[1][0].flatten() for one in wanted]))
    check_gradients([out], [want], leaves, wide, generator, scale=3.0)


def test_packed_rows_of_no_sequence_stay_unwritten(npu):
    generator = fresh_generator()
    tensors = packed(generator, [6], [6], 2, 2, 8)
    out = ops.npu_fusion_attention(
        *(t.to(DEVICE) for t in tensors), 2, "TND", actual_seq_qlen=[2, 4, 0], actual_seq_kvlen=[2, 4, 0]
    )[0]
    assert out[:4].isfinite().all() and out[4:].isnan().all()


@pytest.mark.parametrize(
    "mode, tokens", [(7, {"pre_tockens": 6, "next_tockens": -2}), (8, {"pre_tockens": 4, "next_tockens": 1})]
)
def test_sequences_cut_across_cards(npu, triangle, mode, tokens):
    """The example of the documentation: one sequence is a band, the others are causal as before the cut."""
    generator = fresh_generator()
    lengths_q, lengths_kv = ([3, 2], [3, 6]) if mode == 7 else ([3, 5, 4], [4, 5, 4])
    tensors = packed(generator, lengths_q, lengths_kv, 2, 2, 8)
    ends = [torch.tensor(n).cumsum(0).tolist() for n in (lengths_q, lengths_kv)]
    out = ops.npu_fusion_attention(
        *(t.to(DEVICE) for t in tensors), 2, "TND", scale=0.4, sparse_mode=mode, atten_mask=triangle.to(DEVICE),
        actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **tokens,
    )[0]  # fmt: skip
    parts = [cut(t.double(), n) for t, n in zip(tensors, (lengths_q, lengths_kv, lengths_kv), strict=True)]
    wanted = []
    for place, (q, k, v) in enumerate(zip(*parts, strict=True)):
        rows, columns = q.shape[2], k.shape[2]
        if place == (len(lengths_q) - 1 if mode == 7 else 0):
            visible = band(rows, columns, tokens["pre_tockens"], tokens["next_tockens"])
        else:
            visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows if mode == 7 else 0)
        wanted.append(truth(q, k, v, visible, 0.4)[0][0].transpose(0, 1))
    assert_near(out, torch.cat(wanted))


def test_pse_stands_inside_the_scale(npu):
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8))]
    for shape in ((2, 4, 5, 6), (1, 4, 5, 6), (2, 4, 1, 6)):
        pse = draw(generator, *shape)
        out = ops.npu_fusion_attention(*(t.to(DEVICE) for t in dense), 4, "BNSD", pse=pse.to(DEVICE), scale=0.25)[0]
        want, _ = truth(*in_float64(*dense), torch.ones(5, 6, dtype=torch.bool), 0.25, pse.double())
        assert_near(out, want)


@pytest.mark.parametrize("version", ["npu_fusion_attention", "npu_fusion_attention_v3"])
def test_sink(npu, triangle, version):
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))]
    sink = draw(generator, 4)
    leaves, wide = on_device(*dense, sink), in_float64(*dense, sink)
    out = getattr(ops, version)(
        *leaves[:3], 4, "BNSD", scale=0.5, sparse_mode=3, atten_mask=triangle.to(DEVICE), sink=leaves[3]
    )[0]
    want, _ = truth(*wide[:3], band(5, 6, 99, 0), 0.5, sink=wide[3])
    assert_near(out, want)
    check_gradients([out], [want], leaves, wide, generator, scale=3.0)


def test_version_three_takes_lengths_as_tensors(npu, triangle):
    generator = fresh_generator()
    tensors = packed(generator, [3, 5], [4, 5], 2, 2, 8)
    leaves = on_device(*tensors)
    more = {"scale": 0.4, "sparse_mode": 3, "atten_mask": triangle.to(DEVICE)}
    first = ops.npu_fusion_attention(*leaves, 2, "TND", actual_seq_qlen=[3, 8], actual_seq_kvlen=[4, 9], **more)[0]
    third = ops.npu_fusion_attention_v3(
        *leaves, 2, "TND", actual_seq_qlen=torch.tensor([3, 8]), actual_seq_kvlen=torch.tensor([4, 9]), **more
    )[0]
    assert torch.equal(first.cpu(), third.cpu())
    third.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_partial_gradients_of_a_merged_attention(npu):
    """With the output and the statistics of the whole, the gradients of a part are those of the whole."""
    generator = fresh_generator()
    q, k, v = (draw(generator, *s) for s in ((1, 2, 4, 8), (1, 2, 10, 8), (1, 2, 10, 8)))
    wide = in_float64(q, k, v)
    want, _ = truth(*wide, torch.ones(4, 10, dtype=torch.bool), 0.5)
    upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    want.backward(upstream)
    whole = ops.npu_fusion_attention(*(t.to(DEVICE) for t in (q, k, v)), 2, "BNSD", scale=0.5)
    parts = []
    for piece in (slice(0, 6), slice(6, 10)):
        given = {"softmax_max": whole[1], "softmax_sum": whole[2], "attention_in": whole[0], "scale_value": 0.5}
        tensors = (q, k[:, :, piece].contiguous(), v[:, :, piece].contiguous(), upstream.float())
        parts.append(ops.npu_fusion_attention_grad(*(t.to(DEVICE) for t in tensors), 2, "BNSD", **given))
    assert_near(parts[0][0] + parts[1][0], wide[0].grad, scale=3.0)
    for place in (1, 2):
        assert_near(torch.cat([part[place].cpu() for part in parts], 2), wide[place].grad, scale=3.0)


# ---- what surprises


def test_a_mode_without_a_mask_is_full_attention(npu):
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((1, 2, 5, 8),) * 3]
    for mode in (2, 3, 4):
        out = ops.npu_fusion_attention(
            *(t.to(DEVICE) for t in dense), 2, "BNSD", sparse_mode=mode, pre_tockens=0, next_tockens=0
        )[0]
        assert_near(out, truth(*in_float64(*dense), torch.ones(5, 5, dtype=torch.bool), 1.0)[0])


def test_a_forgotten_scale_is_one(npu):
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((1, 2, 5, 8),) * 3]
    out = ops.npu_fusion_attention(*(t.to(DEVICE) for t in dense), 2, "BNSD")[0]
    assert_near(out, truth(*in_float64(*dense), torch.ones(5, 5, dtype=torch.bool), 1.0)[0])


def test_rows_without_effect(npu):
    """A row masked all over averages the values; with inner_precise 2 it gives 0, and its gradients are 0."""
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))]
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[1] = True
    call = {"scale": 0.5, "sparse_mode": 1, "atten_mask": hidden.to(DEVICE)}
    careless = ops.npu_fusion_attention(*(t.to(DEVICE) for t in dense), 2, "BNSD", **call)[0]
    assert_near(careless[:, :, 1], dense[2].double().mean(2))
    leaves, wide = on_device(*dense), in_float64(*dense)
    out, top, total, *_ = ops.npu_fusion_attention(*leaves, 2, "BNSD", inner_precise=2, **call)
    want, _ = truth(*wide, ~hidden, 0.5)
    assert_near(out, want)
    assert (top[:, :, 1].cpu() == torch.finfo(torch.float32).min).all()
    assert (total[:, :, 1].cpu() == torch.finfo(torch.float32).max).all()
    out.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert leaves[0].grad[:, :, 1].abs().max() < 1e-30


def test_more_queries_than_keys_are_seen_in_mode_three(npu, triangle):
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((1, 2, 6, 8), (1, 2, 4, 8), (1, 2, 4, 8))]
    out = ops.npu_fusion_attention(
        *(t.to(DEVICE) for t in dense), 2, "BNSD", sparse_mode=3, atten_mask=triangle.to(DEVICE)
    )[0]
    assert (out[:, :, :2].cpu() == 0).all()
    assert_near(out, truth(*in_float64(*dense), band(6, 4, 99, 0), 1.0)[0])


def test_a_window_is_mode_four_not_three(npu, triangle):
    generator = fresh_generator()
    dense = [draw(generator, *s) for s in ((1, 2, 9, 8),) * 3]
    tokens = {"pre_tockens": 2, "next_tockens": 0, "atten_mask": triangle.to(DEVICE)}
    outs = [
        ops.npu_fusion_attention(*(t.to(DEVICE) for t in dense), 2, "BNSD", sparse_mode=mode, **tokens)[0]
        for mode in (3, 4)
    ]
    window = truth(*in_float64(*dense), band(9, 9, 2, 0), 1.0)[0]
    assert_near(outs[1], window)
    assert (outs[0].cpu().double() - window).abs().max() > 0.01, "mode 3 ignores the tokens"


def test_head_groups_are_neighbours(npu):
    generator = fresh_generator()
    q, k, v = (draw(generator, *s) for s in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)))
    out = ops.npu_fusion_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), 4, "BNSD")[0]
    alone = ops.npu_fusion_attention(
        q[:, 2:].contiguous().to(DEVICE), k[:, 1:].contiguous().to(DEVICE), v[:, 1:].contiguous().to(DEVICE), 2, "BNSD"
    )[0]
    assert torch.equal(out[:, 2:].cpu(), alone.cpu())

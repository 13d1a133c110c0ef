"""Dense and paged attention against the formula in float64: masks, alignments, windows, sinks, pages, extremes."""

import math

import pytest
import torch

from atb_modules.testing.quantized import code_products_bound

OPS = torch.ops.atb_modules
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def visible(q_len, kv_len, causal, left, right):
    """bool (q_len, kv_len): what the structure of a call lets a query see."""
    q_pos = torch.arange(q_len)[:, None] + (0 if causal == 2 else kv_len - q_len)
    k_pos = torch.arange(kv_len)[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        seen &= k_pos <= q_pos
    if left >= 0:
        seen &= k_pos >= q_pos - left
    if right >= 0:
        seen &= k_pos <= q_pos + right
    return seen, q_pos, k_pos


def formula(q, k, v, mask, sinks, slopes, causal, left, right, scale, softcap):
    """(out, lse) in float64, straight from the definition."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    seen, q_pos, k_pos = visible(q.shape[2], k.shape[2], causal, left, right)
    logits = q @ k.transpose(-1, -2) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if slopes is not None:
        logits = logits - slopes.double()[:, None, None] * (q_pos - k_pos).abs()
    logits = logits.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -math.inf)
    elif mask is not None:
        logits = logits + mask.double()
    none = torch.isneginf(logits).all(-1, keepdim=True)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None])[..., : k.shape[2]]
    return torch.where(none, 0.0, torch.nan_to_num(weights) @ v), lse


def check(
    q, k, v, mask=None, sinks=None, slopes=None, causal=0, left=-1, right=-1, scale=None, softcap=0.0, factor=1.0
):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = OPS.attention(q, k, v, mask, sinks, slopes, None, None, 0, causal, left, right, scale, softcap)
    want, want_lse = formula(q, k, v, mask, sinks, slopes, causal, left, right, scale, softcap)
    bound = TOLERANCE[q.dtype] * factor
    torch.testing.assert_close(out.double(), want, atol=bound, rtol=bound)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    return out


def draw(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, heads, q_len, head_dim)
    q = torch.randn(shape, generator=g).to(dtype)
    k = torch.randn((batch, kv_heads, kv_len, head_dim), generator=g).to(dtype)
    v = torch.randn((batch, kv_heads, kv_len, head_dim), generator=g).to(dtype)
    return q, k, v


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(2, 4, 2, 33, 33, 64), (1, 6, 2, 70, 131, 80), (1, 3, 3, 1, 9, 20), (2, 8, 1, 5, 200, 128), (1, 2, 2, 9, 4, 8)],
)
def test_shapes_and_dtypes(isa, sizes, dtype):
    for causal in (0, 1, 2):
        check(*draw(*sizes, dtype=dtype), causal=causal)


@pytest.mark.parametrize("causal,left,right", [(1, 0, 0), (1, 7, -1), (0, 5, 3), (0, -1, 2), (2, 9, -1), (1, 100, -1)])
def test_windows(isa, causal, left, right):
    check(*draw(1, 4, 2, 75, 140, 32), causal=causal, left=left, right=right)
    check(*draw(1, 4, 2, 140, 75, 32), causal=causal, left=left, right=right)


def test_masks_softcap_alibi_and_sinks(isa):
    q, k, v = draw(2, 4, 2, 37, 90, 48)
    g = torch.Generator().manual_seed(1)
    slopes, sinks = torch.rand(4, generator=g), torch.tensor([-2.0, 0.0, 3.0, 8.0])
    for shape in ((2, 4, 37, 90), (1, 1, 37, 90), (2, 1, 1, 90), (37, 90), (4, 1, 90), (1, 1, 37, 1)):
        keep = torch.rand(shape, generator=g) > 0.4
        check(q, k, v, mask=keep, causal=1)
        check(q, k, v, mask=torch.randn(shape, generator=g), sinks=sinks)
        check(q, k, v, mask=torch.zeros(shape).masked_fill(~keep, -math.inf), slopes=slopes, softcap=7.0)
    check(q, k, v, slopes=slopes, causal=1, sinks=sinks, left=11)
    check(q, k, v, softcap=2.0, causal=1, scale=0.9)


def test_rows_that_see_nothing(isa):
    q, k, v = draw(1, 2, 2, 12, 5, 16)
    out, lse = OPS.attention(q, k, v, None, None, None, None, None, 0, 1, -1, -1, 0.25, 0.0)
    assert (out[:, :, :7] == 0).all() and torch.isneginf(lse[:, :, :7]).all()
    sinks = torch.tensor([1.5, -0.5])
    out, lse = OPS.attention(q, k, v, None, sinks, None, None, None, 0, 1, -1, -1, 0.25, 0.0)
    assert (out[:, :, :7] == 0).all()
    torch.testing.assert_close(lse[0, :, :7], sinks[:, None].expand(2, 7))
    check(q, k, v, mask=torch.zeros(12, 5, dtype=torch.bool))


@pytest.mark.parametrize("q_len,kv_len,batch", [(0, 5, 2), (4, 0, 2), (0, 0, 1), (3, 5, 0)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_empty_sequences(isa, q_len, kv_len, batch, dtype):
    q, k, v = draw(batch, 4, 2, q_len, kv_len, 16, dtype)
    out, lse = OPS.attention(q, k, v, None, None, None, None, None, 0, 1, -1, -1, 0.25, 0.0)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    if kv_len == 0:
        assert (out == 0).all() and torch.isneginf(lse).all()


def test_lengths_of_keys_and_values_must_agree():
    q, k, _ = draw(1, 1, 1, 3, 5, 8)
    with pytest.raises(ValueError, match=r"v must have the shape \(1, 1, 5, 8\).*got \(1, 1, 6, 8\)"):
        OPS.attention(q, k, torch.randn(1, 1, 6, 8), None, None, None, None, None, 0, 0, -1, -1, 1.0, 0.0)
    with pytest.raises(ValueError, match="multiple of the kv heads, got 3 and 2"):
        OPS.attention(*draw(1, 3, 2, 3, 5, 8), None, None, None, None, None, 0, 0, -1, -1, 1.0, 0.0)
    with pytest.raises(TypeError, match="mask must be bool"):
        mask = torch.ones(3, 5, dtype=torch.int64)
        OPS.attention(*draw(1, 1, 1, 3, 5, 8), mask, None, None, None, None, 0, 0, -1, -1, 1.0, 0.0)


def test_strided_and_expanded_inputs(isa):
    q, k, v = (torch.randn(1, 2, 64, 64).transpose(-1, -2) for _ in range(3))
    check(q, k, v, causal=1)
    fused = torch.randn(2, 40, 3, 4, 32)
    q, k, v = fused.permute(2, 0, 3, 1, 4)
    check(q, k, v)
    check(q, k[:, :1].expand(2, 4, 40, 32), v[:, :1].expand(2, 4, 40, 32))


def test_extreme_logits(isa):
    q, k, v = draw(1, 2, 2, 16, 100, 8)
    check(q * 100, k * 100, v, softcap=50.0, factor=30)
    half = [x.half() for x in (q * 250, k * 250, v)]
    check(*half, softcap=50.0, factor=30)
    far = torch.rand(1, 2, 100, 8) * -1000 - 500
    out = check(torch.full((1, 2, 16, 8), 300.0), far, v, scale=1.0, factor=1e4)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("kv_len", [16384, 65536])
def test_long_rows(isa, kv_len):
    q, k, v = draw(1, 1, 1, 3, kv_len, 64)
    check(q, k, v)
    check(q * 8, k, v, causal=1, factor=8)


def pages_of(k, v, lengths, page_size, dtype, filler=math.nan):
    """Shuffled pages holding k, v (batch, kv_heads, kv_len, head_dim); everything else is `filler`."""
    batch, kv_heads, _, head_dim = k.shape
    blocks = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((batch, max(max(blocks), 1)), -1, dtype=torch.int32)
    shape = (sum(blocks) + 2, kv_heads, page_size, head_dim)
    k_pages, v_pages = torch.full(shape, filler, dtype=dtype), torch.full(shape, filler, dtype=dtype)
    for b, n in enumerate(lengths):
        for i in range(blocks[b]):
            page = table[b, i] = order.pop()
            size = min(page_size, n - i * page_size)
            k_pages[page, :, :size] = k[b, :, i * page_size : i * page_size + size].to(dtype)
            v_pages[page, :, :size] = v[b, :, i * page_size : i * page_size + size].to(dtype)
    return k_pages, v_pages, table


@pytest.mark.parametrize("page_dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("query_lengths", [(1, 1, 1), (3, 1, 20), (1, 0, 1), (0, 65, 2)])
@pytest.mark.parametrize(
    "heads,kv_heads,head_dim,page_size,left",
    [(6, 2, 64, 16, -1), (4, 4, 80, 4, 20), (9, 1, 40, 128, -1), (5, 1, 256, 16, 3)],
)
def test_pages(isa, heads, kv_heads, head_dim, page_size, left, query_lengths, page_dtype):
    lengths = [37, 1, 70]
    lengths = [max(n, q) for n, q in zip(lengths, query_lengths, strict=True)]
    g = torch.Generator().manual_seed(5)
    k = torch.randn((3, kv_heads, max(lengths), head_dim), generator=g).to(page_dtype).float()
    v = torch.randn((3, kv_heads, max(lengths), head_dim), generator=g).to(page_dtype).float()
    k_pages, v_pages, table = pages_of(k, v, lengths, page_size, page_dtype)
    q = torch.randn((sum(query_lengths), heads, head_dim), generator=g)
    slopes, sinks = torch.rand(heads, generator=g), torch.randn(heads, generator=g)
    cu = torch.tensor([0, *query_lengths]).cumsum(0).int()
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    for extra in ((None, None, 0.0), (sinks, slopes, 5.0)):
        out, lse = OPS.paged_attention(
            q, k_pages, v_pages, table, kv_lengths, cu, extra[0], extra[1], True, left, -1, 0.2, extra[2]
        )
        for b, n in enumerate(query_lengths):
            if n == 0:
                continue
            rows = slice(int(cu[b]), int(cu[b + 1]))
            row_q = q[rows].transpose(0, 1)[None]
            row_k, row_v = k[b : b + 1, :, : lengths[b]], v[b : b + 1, :, : lengths[b]]
            want, want_lse = formula(row_q, row_k, row_v, None, extra[0], extra[1], 1, left, -1, 0.2, extra[2])
            torch.testing.assert_close(out[rows].double(), want[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[:, rows].double(), want_lse[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("query_lengths", [(1, 1, 1), (3, 1, 20)])
@pytest.mark.parametrize("heads,kv_heads,head_dim,page_size,left", [(16, 2, 64, 16, -1), (9, 1, 40, 3, 20)])
def test_int8_pages(isa, heads, kv_heads, head_dim, page_size, left, query_lengths):
    """Codes with scales read as the float32 values that they stand for."""
    g = torch.Generator().manual_seed(6)
    blocks = -(-70 // page_size)
    codes = torch.randint(-127, 128, (2, 3 * blocks, kv_heads, page_size, head_dim), generator=g, dtype=torch.int8)
    scales = torch.rand(2, 3 * blocks, kv_heads, generator=g) / 50
    values = codes * scales[..., None, None]
    table = torch.randperm(3 * blocks, generator=g).int().reshape(3, blocks)
    cu = torch.tensor([0, *query_lengths]).cumsum(0).int()
    where = table, torch.tensor([37, 1, 70], dtype=torch.int32), cu, None, None, True, left, -1, 0.1, 0.0
    q = torch.randn((sum(query_lengths), heads, head_dim), generator=g)
    ours = OPS.paged_attention(q, *codes.unbind(), *where, *scales.unbind())[0]
    bound = code_products_bound(q, *(float(v.abs().max()) for v in values), scale=0.1)[..., None].float()
    close = (ours - OPS.paged_attention(q, *values.unbind(), *where)[0]).abs()
    assert (close <= 1e-5 + bound).all()


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 200])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_int8_codes_of_every_shape(isa, head_dim, group):
    """Sinks, softcap, slopes, windows and ragged lengths over products of bytes; the average error is far smaller."""
    g = torch.Generator().manual_seed(head_dim + group)
    lengths, page_size, kv_heads = [1, 15, 17, 64, 200, 331], 48, 2
    pages = sum(-(-n // page_size) for n in lengths)
    codes = torch.randint(-127, 128, (2, pages, kv_heads, page_size, head_dim), generator=g, dtype=torch.int8)
    scales = torch.rand(2, pages, kv_heads, generator=g) / 50
    values = codes * scales[..., None, None]
    table, free = torch.full((len(lengths), 7), -1, dtype=torch.int32), iter(torch.randperm(pages, generator=g))
    for row, n in enumerate(lengths):
        for block in range(-(-n // page_size)):
            table[row, block] = next(free)
    cu = torch.arange(len(lengths) + 1, dtype=torch.int32)
    q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=g)
    sinks, slopes = torch.randn(kv_heads * group, generator=g), torch.rand(kv_heads * group, generator=g) / 10
    for extras, left, softcap in ((None, -1, 0.0), (sinks, 70, 0.0), (None, -1, 5.0)):
        alibi = None if extras is None else slopes
        where = table, torch.tensor(lengths).int(), cu, extras, alibi, True, left, -1, head_dim**-0.5, softcap
        ours, lse = OPS.paged_attention(q, *codes.unbind(), *where, *scales.unbind())
        want, want_lse = OPS.paged_attention(q, *values.unbind(), *where)
        torch.testing.assert_close(ours, want, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(lse, want_lse, atol=2e-4, rtol=2e-4)
        assert (ours - want).square().mean().sqrt() <= 1e-4 * want.square().mean().sqrt() + 1e-7


@pytest.mark.parametrize("where", ["query", "key scale", "value scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_over_int8_pages(isa, where, value):
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (2, 2, 1, 16, 64), generator=g, dtype=torch.int8)
    scales, q = torch.rand(2, 2, 1, generator=g), torch.randn(2, 4, 64, generator=g)
    if where == "query":
        q[0, 1, 5] = value
    else:
        scales[int(where == "value scale"), 0, 0] = value
    table, lengths, cu = torch.tensor([[0], [1]]).int(), torch.tensor([16, 16]).int(), torch.arange(3).int()
    out, _ = OPS.paged_attention(
        q, *codes.unbind(), table, lengths, cu, None, None, True, -1, -1, 0.1, 0.0, *scales.unbind()
    )
    hit = out[0, 1] if where == "query" else out[0]
    assert not torch.isfinite(hit).all() and torch.isfinite(out[1]).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 37, 64, 70])
def test_unwritten_slots_do_not_matter(isa, length):
    k, v = torch.randn(1, 2, length, 80), torch.randn(1, 2, length, 80)
    q = torch.randn(length, 4, 80)
    clean, dirty = pages_of(k, v, [length], 16, torch.float32, 0.0), pages_of(k, v, [length], 16, torch.float32)
    kv_lengths = torch.tensor([length], dtype=torch.int32)
    for rows in (q, q[-1:]):
        cu = torch.tensor([0, len(rows)], dtype=torch.int32)
        results = [
            OPS.paged_attention(rows, kp, vp, t, kv_lengths, cu, None, None, True, -1, -1, 0.1, 0.0)[0]
            for kp, vp, t in (clean, dirty)
        ]
        assert torch.isfinite(results[1]).all() and torch.equal(results[0], results[1])


def test_pages_outside_the_window_need_not_exist(isa):
    k, v = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    k_pages, v_pages, table = pages_of(k, v, [70], 8, torch.float32)
    q, kv_lengths = torch.randn(3, 4, 16), torch.tensor([70], dtype=torch.int32)
    for n in (3, 1):
        cu = torch.tensor([0, n], dtype=torch.int32)
        args = (kv_lengths, cu, None, None, True, 10, -1, 0.25, 0.0)
        before = OPS.paged_attention(q[:n], k_pages, v_pages, table, *args)[0]
        freed = table.clone()
        freed[0, : (70 - n - 10) // 8] = -1
        assert torch.equal(before, OPS.paged_attention(q[:n], k_pages, v_pages, freed, *args)[0])


def test_opcheck_and_out_variant():
    q, k, v = draw(1, 4, 2, 7, 9, 16)
    torch.library.opcheck(OPS.attention.default, (q, k, v, None, None, None, None, None, 0, 1, -1, -1, 0.25, 0.0))
    k_pages, v_pages, table = pages_of(k, v, [9], 4, torch.float32, 0.0)
    packed = q[0].transpose(0, 1)
    lengths, cu = torch.tensor([9], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32)
    args = (packed, k_pages, v_pages, table, lengths, cu, None, None, True, -1, -1, 0.25, 0.0)
    torch.library.opcheck(OPS.paged_attention.default, args)
    out, lse = torch.full((7, 4, 16), math.nan), torch.full((4, 7), math.nan)
    OPS.paged_attention.out(*args, out=out, lse=lse)
    torch.testing.assert_close((out, lse), OPS.paged_attention(*args), atol=0, rtol=0)

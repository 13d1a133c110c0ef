"""Overlays and reach: two ways of saying what a query sees, one from predicates, one in O(n), that must agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import AttentionSpec, Causal
from atb_modules.overlays import Overlays
from atb_modules.reach import reach, seen_pairs

few = st.integers(0, 4)


@st.composite
def calls(draw):
    """A spec, its overlays and the sizes of a call."""
    spec = AttentionSpec(
        causal=draw(st.sampled_from(list(Causal))),
        window=draw(st.none() | st.tuples(st.none() | few, st.none() | few)),
        global_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        prefix=draw(st.sampled_from([0, 0, 2, 5])),
        chunk=draw(st.sampled_from([None, None, 1, 3])),
    )
    cu_seqlens_q = cu_seqlens_k = image_ids = None
    q_len, kv_len = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    packed = draw(st.booleans())
    if packed:
        lengths = draw(st.lists(st.tuples(few, st.integers(0, 6)), min_size=1, max_size=4))
        starts = torch.tensor([(0, 0), *lengths]).cumsum(0).int()
        cu_seqlens_q, cu_seqlens_k = starts[:, 0].contiguous(), starts[:, 1].contiguous()
        q_len, kv_len = starts[-1].tolist()
    rows = 1 if packed else draw(st.integers(1, 2))
    if kv_len and draw(st.booleans()):
        ids = st.lists(st.integers(-1, 1), min_size=kv_len, max_size=kv_len)
        image_ids = torch.tensor(draw(st.lists(ids, min_size=rows, max_size=rows)))
    return spec, Overlays(cu_seqlens_q, cu_seqlens_k, image_ids), rows, q_len, kv_len


@settings(max_examples=600, deadline=None)
@given(calls())
def test_reach_is_the_dense_mask(call):
    spec, overlays, rows, q_len, kv_len = call
    overlays.check(rows, 1, q_len, kv_len, None)
    mask = spec.dense_mask(q_len, kv_len, overlays=overlays)
    mask = (mask[None] if mask.dim() == 2 else mask[:, 0]).expand(rows, q_len, kv_len)
    far_low, far_high, low, high, _ = reach(spec, q_len, kv_len, overlays).unbind(-1)
    keys = torch.arange(kv_len)
    seen = (keys >= low[..., None]) & (keys < high[..., None])
    seen |= (keys >= far_low[..., None]) & (keys < far_high[..., None])
    assert torch.equal(seen.expand(rows, q_len, kv_len), mask)
    assert ((far_high <= low) | (far_high == far_low)).all() and (far_low <= far_high).all()


@pytest.mark.parametrize(
    ("spec", "overlays", "drawing"),
    [
        (AttentionSpec(causal=True, window=(1, 0), global_tokens=1), Overlays(), "x....|xx...|xxx..|x.xx.|x..xx"),
        (AttentionSpec(causal=True, chunk=2), Overlays(), "x....|xx...|..x..|..xx.|....x"),
        (
            AttentionSpec(causal=True),
            Overlays(image_ids=torch.tensor([[-1, 7, 7, -1, 8]])),
            "x....|xxx..|xxx..|xxxx.|xxxxx",
        ),
        (AttentionSpec(causal=True, prefix=2), Overlays(), "xx...|xx...|xxx..|xxxx.|xxxxx"),
        (AttentionSpec(window=(1, 1), global_tokens=1), Overlays(), "xxxxx|xxx..|xxxx.|x.xxx|x..xx"),
        (
            AttentionSpec(causal=True),
            Overlays(*(torch.tensor([0, 2, 5], dtype=torch.int32),) * 2),
            "x....|xx...|..x..|..xx.|..xxx",
        ),
        (
            AttentionSpec(block_size=2),
            Overlays(block_mask=torch.tensor([[[[1, 0, 0], [0, 1, 1], [1, 0, 1]]]], dtype=torch.bool)),
            "xx...|xx...|..xxx|..xxx|xx..x",
        ),
    ],
    ids=["global", "chunk", "image", "prefix", "two-sided", "packed", "blocks"],
)
def test_the_drawings_of_masks(spec, overlays, drawing):
    mask = spec.dense_mask(5, 5, overlays=overlays)
    rows = mask.reshape(5, 5).tolist()
    assert "|".join("".join("x" if seen else "." for seen in row) for row in rows) == drawing


def test_images_side_by_side_with_equal_numbers_are_one_and_apart_are_two():
    overlays = Overlays(image_ids=torch.tensor([[0, 0, -1, 0]]))
    mask = AttentionSpec(causal=True).dense_mask(4, 4, overlays=overlays)[0, 0]
    assert mask[0].tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("overlays", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)}, "cu_seqlens_q is given alone"),
        ({"cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 4])}, "cu_seqlens_q is torch.int64"),
        (
            {name: torch.tensor([0, 3, 2, 4], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")},
            "cu_seqlens_q is \\[0, 3, 2, 4\\]",
        ),
        (
            {name: torch.tensor([0, 5], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")},
            "up to 4 tokens",
        ),
        ({"image_ids": torch.zeros(1, 4)}, "image_ids is torch.float32"),
        ({"image_ids": torch.zeros(1, 3, dtype=torch.int64)}, "image_ids has shape"),
        ({"block_mask": torch.ones(1, 1, 2, 2, dtype=torch.bool)}, "block_mask is given alone"),
        ({"image_ids": [0, 1]}, "image_ids is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_named(overlays, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Overlays(**overlays).check(1, 2, 4, 4, None)


def test_seen_pairs_follow_the_structure():
    sizes = (1, 2, 1000, 1000)
    assert seen_pairs(AttentionSpec(causal=True), None, sizes) is None
    starts = torch.tensor([0, 500, 1000], dtype=torch.int32)
    packed = seen_pairs(AttentionSpec(), Overlays(starts, starts), sizes)
    assert packed == 2 * 2 * 500 * 500
    half = torch.zeros(1, 1, 10, 10, dtype=torch.bool)
    half[..., :5] = True
    assert seen_pairs(AttentionSpec(block_size=100), Overlays(block_mask=half), sizes) == 1e6

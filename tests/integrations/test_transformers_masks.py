"""Structured masks say exactly what transformers' dense masks say, or are not made."""

import functools

import pytest
import torch

masking = pytest.importorskip("transformers.masking_utils")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from atb_modules.integrations import transformers_masks  # noqa: E402
from atb_modules.integrations.transformers import attention_forward  # noqa: E402
from atb_modules.integrations.transformers_masks import StructuredMask, structured_mask  # noqa: E402
from atb_modules.overlays import Overlays  # noqa: E402
from atb_modules.spec import AttentionSpec  # noqa: E402


def spelled_out(mask):
    """The dense mask that the fields of a StructuredMask add up to, by way of ``AttentionSpec.dense_mask``."""
    batch, _, q_len, kv_len = mask.shape
    begin, end = mask.keys
    spec = AttentionSpec(causal=mask.causal, window=mask.window, chunk=mask.chunk)
    if mask.cu_seqlens is not None:
        images = None if mask.images is None else mask.images.reshape(1, -1)
        visible = spec.dense_mask(
            batch * q_len, batch * q_len, None, Overlays(mask.cu_seqlens, mask.cu_seqlens, images)
        )
        visible = visible.reshape(batch, q_len, batch, q_len)
        visible = torch.stack([visible[row, :, row] for row in range(batch)])[:, None]
    else:
        overlays = None if mask.images is None else Overlays(image_ids=mask.images)
        visible = spec.dense_mask(q_len, end - begin, None, overlays)
    visible = visible.expand(batch, 1, q_len, end - begin)
    if mask.padding is not None:
        visible = visible & mask.padding[:, None, None]
    full = torch.zeros(mask.shape, dtype=torch.bool)
    full[..., begin:end] = visible
    return full


def largest_tensor(mask):
    tensors = [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]
    return max((tensor.numel() for tensor in tensors), default=0)


def image_ids(lengths, total):
    """Runs of text (-1) and of images (0, 1, ...) in turn."""
    ids = torch.full((total,), -1)
    at = 0
    for number, (text, image) in enumerate(lengths):
        ids[at + text : at + text + image] = number
        at += text + image
    return ids


@st.composite
def calls(draw):
    """Arguments of a mask function as ``masking_utils`` builds them, with caches, padding and overlays."""
    batch, q_len = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["causal", "window", "chunk", "both_ways", "both_ways_window", "gemma3"]))
    size = draw(st.integers(1, 9))
    cache = draw(st.sampled_from(["none", "grown", "static", "sliding"]))
    q_offset = 0 if cache == "none" else draw(st.integers(0, 14))
    kv_offset, kv_len = 0, q_offset + q_len
    if cache == "static":
        kv_len += draw(st.integers(0, 6))
    if cache == "sliding":
        kv_offset = draw(st.integers(0, q_offset))
        kv_len -= kv_offset
    total = kv_offset + kv_len
    padding = None
    if draw(st.booleans()):
        padding = torch.ones(batch, q_offset + q_len, dtype=torch.bool)
        for row in range(batch):
            amount = draw(st.integers(0, q_offset + q_len - 1))
            if draw(st.booleans()):
                padding[row, :amount] = False
            else:
                padding[row, padding.shape[1] - amount :] = False
    starts = torch.zeros(batch, dtype=torch.long)
    if padding is not None:
        starts = (padding.cumsum(-1) == 0).sum(-1)
    runs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=3)
    images = torch.stack([image_ids(draw(runs), total + 30)[:total] for _ in range(batch)])
    function = {
        "causal": masking.causal_mask_function,
        "window": masking.sliding_window_causal_mask_function(size),
        "chunk": masking.chunked_causal_mask_function(size, starts),
        "both_ways": masking.bidirectional_mask_function,
        "both_ways_window": masking.sliding_window_bidirectional_mask_function(size),
        "gemma3": masking.and_masks(
            masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(images)),
            masking.sliding_window_overlay(size),
        ),
    }[kind]
    with_images = kind in ("causal", "window", "chunk") and draw(st.booleans())
    packed = cache == "none" and padding is None and kind in ("causal", "window", "chunk") and draw(st.booleans())
    if packed:
        lengths = [draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)) for _ in range(batch)]
        places = [torch.cat([torch.arange(n) for n in [*row, 12]])[:q_len] for row in lengths]
        places = torch.stack(places)
        segments = masking.find_packed_sequence_indices(places)
        if segments is None:
            packed = False
        else:
            function = masking.remap_positions_for_packed_sequence(function, places)
    if with_images:
        function = masking.or_masks(function, masking.blockwise_overlay(images))
    if packed:
        function = masking.and_masks(function, masking.packed_sequence_mask_function(segments))
    return {
        "batch_size": batch,
        "q_length": q_len,
        "kv_length": kv_len,
        "q_offset": q_offset if draw(st.booleans()) else torch.tensor(q_offset),
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": padding,
    }


@settings(max_examples=400, deadline=None)
@given(calls())
def test_a_structured_mask_says_what_the_dense_one_says(call):
    dense = masking.sdpa_mask(**call, allow_is_causal_skip=False)
    mask = structured_mask(**call, allow_is_causal_skip=False)
    if isinstance(mask, torch.Tensor):
        assert torch.equal(mask, dense)
        return
    assert torch.equal(spelled_out(mask), dense)
    assert torch.equal(mask.dense(), dense)
    assert largest_tensor(mask) <= call["batch_size"] * max(call["kv_length"], 3) + 1
    if structured_mask(**call) is None:
        q_len, kv_len = call["q_length"], call["kv_length"]
        assert torch.equal(dense, torch.ones(q_len, kv_len).tril(kv_len - q_len).bool().expand_as(dense))


@settings(max_examples=100, deadline=None)
@given(calls())
def test_attention_with_either_mask_is_the_same(call):
    batch, q_len, kv_len = call["batch_size"], call["q_length"], call["kv_length"]
    dense = masking.sdpa_mask(**call, allow_is_causal_skip=False)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, heads, length, 8, generator=generator)
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    )
    mask = structured_mask(**call, allow_is_causal_skip=False)
    bias = torch.randn(1, 4, q_len, kv_len, generator=generator)
    for extra in ({}, {"position_bias": bias}):
        expected, _ = attention_forward(torch.nn.Module(), q, k, v, dense, **extra)
        out, _ = attention_forward(torch.nn.Module(), q, k, v, mask, **extra)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def make(function, q_length=12, **changes):
    call = {"batch_size": 2, "q_length": q_length, "kv_length": q_length, "mask_function": function, **changes}
    return structured_mask(**call)


COMPACT = {
    "causal": lambda: make(masking.causal_mask_function, kv_length=20),
    "window": lambda: make(masking.sliding_window_causal_mask_function(4)),
    "window behind a sliding cache": lambda: make(
        masking.sliding_window_causal_mask_function(4), kv_length=15, q_offset=30, kv_offset=27
    ),
    "chunks": lambda: make(masking.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))),
    "chunks behind a cache": lambda: make(
        masking.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)), kv_length=22, q_offset=10
    ),
    "both ways": lambda: make(masking.bidirectional_mask_function),
    "a window both ways": lambda: make(masking.sliding_window_bidirectional_mask_function(3)),
    "a padded chunk": lambda: make(
        masking.chunked_causal_mask_function(12, torch.tensor([0, 5])),
        attention_mask=torch.arange(12) >= torch.tensor([[0], [5]]),
    ),
    "images": lambda: make(
        masking.or_masks(
            masking.causal_mask_function, masking.blockwise_overlay(image_ids([(2, 3), (1, 4)], 12).expand(2, -1))
        )
    ),
}


@pytest.mark.parametrize("name", COMPACT)
def test_what_has_a_compact_form(name):
    mask = COMPACT[name]()
    assert isinstance(mask, StructuredMask)
    assert largest_tensor(mask) <= 2 * 22
    assert torch.equal(spelled_out(mask), mask.dense())


def test_none_where_nothing_but_causality_hides_keys():
    assert make(masking.causal_mask_function) is None
    assert make(masking.causal_mask_function, attention_mask=torch.ones(2, 12, dtype=torch.bool)) is None
    assert make(masking.sliding_window_causal_mask_function(12)) is None
    assert make(masking.causal_mask_function, q_length=1, kv_length=9, q_offset=8) is None
    assert make(masking.causal_mask_function, allow_is_causal_skip=False) is not None
    assert make(masking.bidirectional_mask_function) is not None  # a module may believe that it is causal


def test_what_is_not_known_becomes_dense_and_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(transformers_masks, "_LOGGED", set())

    def every_other_key(batch, head, query, key):
        return key % 2 == 0

    for _ in range(2):
        mask = make(masking.and_masks(masking.causal_mask_function, every_other_key), use_vmap=True)
        assert mask.dtype == torch.bool and mask.shape == (2, 1, 12, 12)
        assert torch.equal(mask[0, 0], torch.ones(12, 12).tril().bool() & (torch.arange(12) % 2 == 0))
    assert [record.name for record in caplog.records] == ["atb_modules.integrations"]
    assert "every_other_key" in caplog.text


@pytest.mark.parametrize(
    "images",
    [
        pytest.param([[0, 0, 1, 1, 0, 0]], id="in two pieces"),
        pytest.param([[-1, 3, 3, 3, 3, 3]], id="longer than the window"),
    ],
)
def test_images_without_a_compact_form_are_dense(images):
    overlay = masking.blockwise_overlay(torch.tensor(images))
    function = masking.and_masks(
        masking.or_masks(masking.causal_mask_function, overlay), masking.sliding_window_overlay(3)
    )
    call = functools.partial(make, function, q_length=6, batch_size=1)
    assert isinstance(call(), torch.Tensor)


def test_a_model_that_treats_it_as_a_tensor_gets_the_dense_mask(caplog, monkeypatch):
    monkeypatch.setattr(transformers_masks, "_LOGGED", set())
    mask = make(masking.sliding_window_causal_mask_function(4))
    dense = mask.dense()
    assert torch.equal(mask[:, :, :3], dense[:, :, :3])
    assert torch.equal(torch.cat([mask, dense], dim=-1), torch.cat([dense, dense], dim=-1))
    assert torch.equal(mask.to(torch.float32), dense.float()) and mask.dtype == torch.bool
    assert torch.equal(torch.where(mask, 1.0, 0.0), dense.float())
    assert caplog.records and mask.ndim == 4 and mask.shape == (2, 1, 12, 12)

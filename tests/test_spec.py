"""Specs and masks: what a query may see, by the definition, position by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules import AttentionSpec, Causal
from atb_modules.spec import window_from_sliding_window

side = st.none() | st.integers(0, 9)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from(list(Causal)), side, side)
def test_dense_mask_is_the_definition(q_len, kv_len, causal, left, right):
    mask = AttentionSpec(causal=causal, window=(left, right)).dense_mask(q_len, kv_len)
    assert mask.shape == (q_len, kv_len) and mask.dtype == torch.bool
    for i in range(q_len):
        position = i if causal is Causal.TOP_LEFT else i + kv_len - q_len
        for j in range(kv_len):
            visible = left is None or j >= position - left
            visible &= right is None or j <= position + right
            visible &= causal is Causal.NONE or j <= position
            assert bool(mask[i, j]) is visible


def test_specs_are_frozen_hashable_and_equal_by_value():
    assert AttentionSpec(causal=True) == AttentionSpec(causal="bottom_right")
    assert hash(AttentionSpec(window=[2, None])) == hash(AttentionSpec(window=(2, None)))
    assert AttentionSpec(window=(None, None)) == AttentionSpec()
    with pytest.raises(AttributeError):
        AttentionSpec().scale = 2.0


def test_hugging_face_windows_count_the_query_itself():
    assert window_from_sliding_window(4) == (3, None)
    assert window_from_sliding_window(None) is None
    mask = AttentionSpec(causal=True, window=window_from_sliding_window(4)).dense_mask(8, 8)
    assert mask.sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": "yes"}, "causal is 'yes'; allowed: 'none', 'bottom_right', 'top_left'"),
        ({"window": 5}, "window is 5"),
        ({"window": (1, 2, 3)}, "window is"),
        ({"window": (-1, None)}, "each side must be an int >= 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "big"}, "scale is 'big'"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": True}, "softcap is True"),
        ({"softcap": 10**400}, "softcap is 1000"),
        ({"scale": 10**400}, "scale is 1000"),
        ({"scale": torch.tensor(1.0)}, "scale is tensor"),
        ({"causal": 1}, "causal is 1"),
        ({"causal": None}, "causal is None"),
        ({"window": "ab"}, "window is 'ab'"),
        ({"window": (1.0, None)}, "each side must be an int >= 0"),
        ({"window": (True, None)}, "each side must be an int >= 0"),
        ({"window": (2**63, None)}, "each side must be an int >= 0"),
    ],
)
def test_bad_specs(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**options)


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ((-1, 3), ValueError, "q_len is -1; allowed: an int of at least 0"),
        ((3, 2.0), TypeError, "kv_len is 2.0"),
        ((3, True), TypeError, "kv_len is True"),
    ],
)
def test_masks_of_bad_lengths(lengths, error, message):
    with pytest.raises(error, match=message):
        AttentionSpec().dense_mask(*lengths)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_sliding_windows_are_positive_ints(value):
    with pytest.raises(ValueError, match="sliding_window is .*allowed: a positive int"):
        window_from_sliding_window(value)

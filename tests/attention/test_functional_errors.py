"""The functional attention ops name what they refuse, by kind, device and size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atb_modules import AttentionSpec
from atb_modules.ops import attention, cache_append, paged_attention, rotary, rotary_append

Q = torch.randn(1, 2, 3, 8)
NAN = float("nan")
STARTS = torch.tensor([0, 2, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": Q.numpy()}, TypeError, "q is ndarray; allowed: a tensor"),
        ({"spec": "causal"}, TypeError, "spec is 'causal' .*allowed: AttentionSpec"),
        ({"spec": None}, TypeError, "spec is None"),
        ({"mask": np.ones((3, 3))}, TypeError, "mask is ndarray; allowed: a tensor or None"),
        ({"sinks": [0.0, 0.0]}, TypeError, "sinks is list"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, TypeError, "sinks is torch.int64"),
        ({"sinks": torch.zeros(2, device="meta")}, ValueError, "sinks is on meta; q is on cpu"),
        ({"alibi_slopes": (0.5, 0.5)}, TypeError, "alibi_slopes is tuple"),
        ({"dropout_p": "a"}, TypeError, "dropout_p is 'a'"),
        ({"dropout_p": NAN}, ValueError, "dropout_p is nan"),
        ({"dropout_p": True}, TypeError, "dropout_p is True"),
        ({"q": Q[..., :0], "k": Q[..., :0]}, ValueError, "q has head_dim 0"),
        ({"strategy": None}, ValueError, "strategy is None"),
        ({"cu_seqlens_q": STARTS}, ValueError, "cu_seqlens_q is given alone"),
        ({"cu_seqlens_q": STARTS.long(), "cu_seqlens_k": STARTS}, ValueError, "cu_seqlens_q is torch.int64"),
        ({"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS[:0]}, ValueError, r"cu_seqlens_k is torch.int32 \(0,\)"),
        ({"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS + 1}, ValueError, r"cu_seqlens_k is \[1, 3, 4\]; allowed: 0"),
        ({"cu_seqlens_q": STARTS.flip(0), "cu_seqlens_k": STARTS}, ValueError, r"cu_seqlens_q is \[3, 2, 0\]"),
        ({"cu_seqlens_q": [0, 3], "cu_seqlens_k": STARTS}, TypeError, "cu_seqlens_q is list"),
        ({"image_ids": torch.zeros(1, 3)}, TypeError, "image_ids is torch.float32"),
        ({"image_ids": torch.zeros(1, 2).long()}, ValueError, r"image_ids has shape \(1, 2\)"),
        ({"image_ids": torch.zeros(1, 3, device="meta").long()}, ValueError, "image_ids is on meta; q is on cpu"),
        ({"block_mask": torch.ones(1, 1, 2, 2).bool()}, ValueError, "block_mask is given alone"),
        ({"spec": AttentionSpec(block_size=2)}, ValueError, "the spec's block_size is given alone"),
        (
            {"spec": AttentionSpec(block_size=2), "block_mask": torch.ones(1, 1, 2, 3).bool()},
            ValueError,
            r"block_mask has shape \(1, 1, 2, 3\)",
        ),
        (
            {"spec": AttentionSpec(block_size=2), "block_mask": torch.ones(1, 1, 2, 2)},
            TypeError,
            "block_mask is torch.float32",
        ),
    ],
)
def test_attention(changes, error, message):
    with pytest.raises(error, match=message):
        attention(**{"q": Q, "k": Q, "v": Q} | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": Q[0].numpy()}, TypeError, "q is ndarray"),
        ({"block_table": None}, TypeError, "block_table is NoneType; allowed: a tensor of torch.int32"),
        ({"kv_lengths": [1]}, TypeError, "kv_lengths is list"),
        ({"cu_seqlens_q": np.array([0, 3])}, TypeError, "cu_seqlens_q is ndarray"),
        ({"block_table": torch.zeros(1, dtype=torch.int32)}, ValueError, r"block_table has shape \(1,\)"),
        ({"spec": None}, TypeError, "spec is None"),
        ({"k_pages": torch.zeros(4, 2, 4, 8, device="meta")}, ValueError, "k_pages is on meta"),
        ({"sinks": [0.0]}, TypeError, "sinks is list"),
    ],
)
def test_paged_attention(changes, error, message):
    good = {
        "q": torch.randn(3, 2, 8),
        "k_pages": torch.zeros(4, 2, 4, 8),
        "v_pages": torch.zeros(4, 2, 4, 8),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "kv_lengths": torch.full((1,), 3, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
        "spec": AttentionSpec(),
    }
    paged_attention(**good)
    with pytest.raises(error, match=message):
        paged_attention(**good | changes)


@pytest.mark.parametrize("strategy", ["cpu", "torch", "reference"])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q is list"),
        ({"q": torch.zeros(3, 4, 8)}, ValueError, r"q is torch.float32 \(3, 4, 8\); k is"),
        ({"q": torch.zeros(2, 4, 8).bfloat16()}, ValueError, "q is torch.bfloat16"),
        ({"cos": None}, TypeError, "cos is NoneType"),
        ({"sin": np.zeros((2, 4))}, TypeError, "sin is ndarray"),
        ({"cos": torch.zeros(1, 4), "sin": torch.zeros(1, 4)}, ValueError, r"cos has shape \(1, 4\)"),
        ({"cos": torch.zeros(2, 5), "sin": torch.zeros(2, 5)}, ValueError, r"allows \(2, at most 4\)"),
        ({"sin": torch.zeros(2, 3)}, ValueError, r"and sin \(2, 3\)"),
        ({"slots": [0, 1]}, TypeError, "slots is list"),
        ({"v_pages": torch.zeros(2, 3, 4, 8, device="meta")}, ValueError, "v_pages is on meta"),
    ],
)
def test_appends(strategy, changes, error, message):
    good = {
        "q": torch.zeros(2, 6, 8),
        "k": torch.zeros(2, 3, 8),
        "v": torch.zeros(2, 3, 8),
        "cos": torch.zeros(2, 4),
        "sin": torch.zeros(2, 4),
        "k_pages": torch.zeros(2, 3, 4, 8),
        "v_pages": torch.zeros(2, 3, 4, 8),
        "slots": torch.arange(2),
    }
    rotary_append(**good, interleaved=False, strategy=strategy)
    with pytest.raises(error, match=message):
        rotary_append(**good | changes, interleaved=False, strategy=strategy)
    if not {"q", "cos", "sin"} & set(changes):
        plain = {name: value for name, value in (good | changes).items() if name not in ("q", "cos", "sin")}
        with pytest.raises(error, match=message):
            cache_append(**plain, strategy=strategy)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Q[0].numpy(), Q, Q), TypeError, "x is ndarray"),
        ((Q[0], np.zeros((2, 4)), np.zeros((2, 4))), TypeError, "cos is ndarray"),
        ((Q[0], torch.zeros(2, 4).long(), torch.zeros(2, 4)), TypeError, "cos is torch.int64"),
        ((Q.expand(2, 2, 3, 8), torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)), ValueError, "leading axes must broadcast"),
        ((Q[0], torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)), ValueError, "leading axes must broadcast"),
        ((Q[0], *torch.zeros(2, 2, 4, device="meta")), ValueError, "cos is on meta and sin on meta; x is on cpu"),
    ],
)
def test_rotary(arguments, error, message):
    with pytest.raises(error, match=message):
        rotary(*arguments)

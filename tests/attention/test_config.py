"""Options and sizes of attention: bad ones are named."""

from __future__ import annotations

import pytest
import torch

from atb_modules import Attention, AttentionConfig
from atb_modules.attention import alibi_slopes

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": "none"}, TypeError, r"causal is 'none' \(str\); allowed: True, False, None"),
        ({"causal": 1}, TypeError, "causal is 1"),
        ({"window": 4}, ValueError, "window is 4"),
        ({"window": (1.5, None)}, ValueError, "window is"),
        ({"scale": NAN}, ValueError, "scale is nan"),
        ({"scale": True}, ValueError, "scale is True"),
        ({"softcap": INF}, ValueError, "softcap is inf"),
        ({"sinks": 1}, TypeError, "sinks is 1"),
        ({"alibi": "yes"}, TypeError, "alibi is 'yes'"),
        ({"qkv_bias": None}, TypeError, "qkv_bias is None"),
        ({"out_bias": 0}, TypeError, "out_bias is 0"),
        ({"qk_norm": True}, ValueError, "qk_norm is True"),
        ({"qk_norm_type": "batchnorm"}, ValueError, "qk_norm_type is 'batchnorm'; allowed: 'rmsnorm', 'layernorm'"),
        ({"qk_norm_config": None}, TypeError, "qk_norm_config is None .*allowed: NormConfig"),
        ({"dropout": "a"}, TypeError, "dropout is 'a'"),
        ({"dropout": NAN}, ValueError, "dropout is nan"),
        ({"dropout": False}, TypeError, "dropout is False"),
        ({"linear_strategy": "fast"}, ValueError, "linear_strategy is 'fast'"),
        ({"cache_strategy": None}, ValueError, "cache_strategy is None"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        AttentionConfig(**options)


def test_a_window_given_as_a_list_leaves_the_config_hashable():
    assert hash(AttentionConfig(window=[3, None])) == hash(AttentionConfig(window=(3, None)))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((32.0, 4), {}, TypeError, "hidden_size is 32.0"),
        ((32, True), {}, TypeError, "num_heads is True"),
        ((32, 4, 8.0), {}, TypeError, "head_dim is 8.0"),
        ((32, 4), {"num_kv_heads": -2}, ValueError, "num_kv_heads is -2"),
        ((32, 4), {"num_kv_heads": "2"}, TypeError, "num_kv_heads is '2'"),
        ((32, 4), {"dtype": torch.int8}, ValueError, "dtype is torch.int8"),
    ],
)
def test_bad_sizes(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Attention(*arguments, **options)


@pytest.mark.parametrize(("heads", "error"), [(0, ValueError), (-4, ValueError), (2.0, TypeError), (None, TypeError)])
def test_slopes_of_bad_heads(heads, error):
    with pytest.raises(error, match="num_heads is"):
        alibi_slopes(heads)

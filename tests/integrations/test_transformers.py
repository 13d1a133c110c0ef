"""The attention function that transformers calls: what it serves, what it refuses, and how it is registered."""

import subprocess
import sys

import pytest
import torch

import atb_modules as atb
from atb_modules.attention.functional import attention
from atb_modules.integrations import transformers_masks
from atb_modules.integrations.transformers import attention_forward
from atb_modules.integrations.transformers_masks import StructuredMask

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["head_mask", "indices", "block_indices", "sinks", "attention_similarity"])
def test_what_would_change_the_result_is_refused_by_name(name):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    with pytest.raises(ValueError, match=f"{name} is given"):
        attention_forward(torch.nn.Module(), q, k, v, None, **{name: torch.ones(1)})
    out, _ = attention_forward(torch.nn.Module(), q, k, v, None, **{name: None})
    assert out.shape == (1, 5, 2, 8)


def test_unknown_arguments_are_named_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(transformers_masks, "_LOGGED", set())
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    attention_forward(torch.nn.Module(), q, k, v, None, use_cache=True, temperature_of_gate=2.0)
    assert "temperature_of_gate" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_len", [5, 9])
@pytest.mark.parametrize("scaling", [None, 0.3, torch.tensor(0.3)])
def test_without_a_mask_causality_is_that_of_sdpa(is_causal, kv_len, scaling):
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, kv_len, 8), torch.randn(2, 2, kv_len, 8)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = is_causal, 2
    sdpa = transformers.AttentionInterface()["sdpa"]
    expected, _ = sdpa(module, q, k, v, None, scaling=None if scaling is None else 0.3)
    out, weights = attention_forward(module, q, k, v, None, scaling=scaling)
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_a_window_without_a_mask():
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    causal, _ = attention_forward(torch.nn.Module(), q, k, v, None, sliding_window=3)
    expected, _ = attention(q, k, v, atb.AttentionSpec(causal=True, window=(2, None)))
    torch.testing.assert_close(causal, expected.transpose(1, 2))


def test_a_mask_of_other_sizes_is_refused():
    mask = StructuredMask((1, 1, 5, 7), True, (0, 7))
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="attention_mask is for batch 1, 5 queries and 7 keys"):
        attention_forward(torch.nn.Module(), q, k, v, mask)


REGISTRATION = """
import importlib, sys
import atb_modules
from atb_modules.integrations.transformers import register
assert "transformers" not in sys.modules
import transformers
registries = transformers.AttentionInterface, transformers.AttentionMaskInterface
assert not any("atb" in registry() for registry in registries)
register()
assert all("atb" in registry() for registry in registries)
for registry in registries:
    del registry._global_mapping["atb"]
importlib.reload(atb_modules)  # transformers is there now
assert all("atb" in registry() for registry in registries)
"""


def test_registration():
    subprocess.run([sys.executable, "-c", REGISTRATION], check=True, timeout=120)

"""Projectors against transformers' own, with the same weights: outputs and gradients."""

import pytest
import torch
from transformers import LlavaConfig, Qwen3VLConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPatchMerger
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger as Qwen2Merger
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchMerger

from atb_modules.multimodal.projectors import LinearProjector, MLPProjector, PatchMerger


def llava():
    config = LlavaConfig(vision_config={"hidden_size": 24}, text_config={"hidden_size": 40, "num_attention_heads": 4})
    ours = MLPProjector(24, 40)
    return LlavaMultiModalProjector(config), ours, {"layers.0": "linear_1", "layers.1": "linear_2"}, 24


def qwen3(norm_joined):
    config = Qwen3VLConfig(vision_config={"hidden_size": 24, "out_hidden_size": 40}).vision_config
    names = {"norm": "norm", "mlp.layers.0": "linear_fc1", "mlp.layers.1": "linear_fc2"}
    return Qwen3VLVisionPatchMerger(config, norm_joined), PatchMerger(24, 40, norm_joined=norm_joined), names, 24


MERGER = {"norm": "ln_q", "mlp.layers.0": "mlp.0", "mlp.layers.1": "mlp.2"}
PAIRS = {
    "llava": llava,
    "qwen2": lambda: (Qwen2Merger(40, 24), PatchMerger(24, 40), MERGER, 24),
    "qwen2_merge3": lambda: (Qwen2Merger(40, 16, 3), PatchMerger(16, 40, 3), MERGER, 16),
    "qwen2_5": lambda: (Qwen2_5_VLPatchMerger(40, 24), PatchMerger(24, 40, layernorm_type="rmsnorm"), MERGER, 24),
    "qwen3": lambda: qwen3(False),
    "qwen3_deepstack": lambda: qwen3(True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equal_to_transformers(name):
    torch.manual_seed(0)
    theirs, ours, names, width = PAIRS[name]()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for part, foreign in names.items():
            for kind, parameter in ours.get_submodule(part).named_parameters():
                parameter.copy_(weights.pop(f"{foreign}.{kind}"))
    assert not weights
    x = torch.randn(36, width, requires_grad=True)
    expected, found = theirs(x), ours(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(expected)
    (a,), (b,) = (torch.autograd.grad((y * weight).sum(), x) for y in (found, expected))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_linear_projector_and_other_depths():
    x = torch.randn(2, 5, 8)
    linear = LinearProjector(8, 6)
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    deep = MLPProjector(8, 6, 10, depth=3, kind="silu", bias=False)
    y = x
    for number, layer in enumerate(deep.layers):
        y = torch.nn.functional.linear(torch.nn.functional.silu(y) if number else y, layer.weight)
    torch.testing.assert_close(deep(x), y, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(MLPProjector(8, 6, depth=1)(x[:, :0]), torch.zeros(2, 0, 6))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"x has shape \(6, 8\); allowed: .* a multiple of 4 patches \(merge_size 2\)"):
        PatchMerger(8, 16)(torch.zeros(6, 8))
    with pytest.raises(ValueError, match="kind is 'swish'"):
        MLPProjector(8, 6, kind="swish")
    with pytest.raises(ValueError, match="depth is 0"):
        MLPProjector(8, 6, depth=0)

"""Norms that are not ours in the slots of a TransformerLayer: modules that take one tensor, wrappers, hooked norms."""

from __future__ import annotations

import copy
import functools
from itertools import product

import pytest
import torch

from atb_modules import RMSNorm, RotaryConfig, TransformerLayer

PLACEMENTS, TYPES = ("pre", "post", "sandwich"), ("decoder", "cross_decoder")
NORMS = ("attention_norm", "attention_post_norm", "cross_norm", "cross_post_norm", "mlp_norm", "mlp_post_norm")


class OneArgument(torch.nn.Module):
    """As LlamaRMSNorm in transformers."""

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden_states.dtype)


class Wrapper(torch.nn.Module):
    """As the wrappers of checkpointing and of compiled modules: any arguments, handed on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Subclass(RMSNorm):
    def forward(self, x):
        return super().forward(x)


def replaced(layer, build):
    """A copy of the layer whose norms are built by `build` from ours, with their weights."""
    twin = copy.deepcopy(layer)
    for name in NORMS:
        if hasattr(twin, name):
            norm = build(getattr(twin, name))
            setattr(twin, name, norm)
    return twin


def one_argument(norm):
    other = OneArgument(32)
    other.weight = norm.weight
    return other


def torch_layer_norm(norm):
    other = torch.nn.LayerNorm(32, norm.config.eps)
    other.load_state_dict(norm.state_dict())
    return other


def subclass(norm):
    other = Subclass(32)
    other.weight = norm.weight
    return other


def patched(norm):
    """An instance whose forward was replaced, as hooks of other libraries do."""
    norm.forward = functools.partial(lambda inner, x: inner(x), norm.forward)
    return norm


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize(("placement", "layer_type"), [*product(PLACEMENTS, TYPES), ("parallel", "decoder")])
@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("rmsnorm", one_argument),
        ("rmsnorm", Wrapper),
        ("rmsnorm", subclass),
        ("rmsnorm", patched),
        ("layernorm", torch_layer_norm),
    ],
)
def test_norms_of_others(kind, build, placement, layer_type, mode):
    layer = TransformerLayer(
        32, 4, layernorm_type=kind, norm_placement=placement, layer_type=layer_type, rotary=RotaryConfig(), mode=mode
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    other = replaced(layer, build)
    options = {"encoder_hidden_states": torch.randn(2, 4, 32)} if layer_type == "cross_decoder" else {}
    x = torch.randn(2, 7, 32)
    before, expected = x.clone(), layer(x, **options)
    torch.testing.assert_close(other(x, **options), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)
    if mode == "inference":
        pieces = [other(part, use_cache=True, **options)[0] for part in x.split([5, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-5, rtol=1e-5)
        return
    other(x, **options).square().sum().backward()
    expected.square().sum().backward()
    gradients = [p.grad for p in other.parameters()]
    assert len(gradients) == len(list(layer.parameters()))
    for mine, theirs in zip(gradients, layer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, atol=1e-3, rtol=1e-3)


def test_the_norm_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    layer = TransformerLayer(32, 4, norm_placement="sandwich", rotary=RotaryConfig())
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(replaced(layer, lambda _: llama.LlamaRMSNorm(32))(x), layer(x), atol=1e-5, rtol=1e-5)

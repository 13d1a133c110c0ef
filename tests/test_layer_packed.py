"""Packed sequences and images through a whole layer: equal to each sequence alone, forward and gradients."""

import pytest
import torch

import atb_modules as atb
from atb_modules.overlays import Overlays

LENGTHS = (5, 1, 17, 8)


def _starts(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("layer_type", ["decoder", "encoder"])
def test_packed_sequences_equal_each_alone(layer_type):
    torch.manual_seed(0)
    layer = atb.TransformerLayer(48, 6, 8, 64, num_kv_heads=2, layer_type=layer_type, rotary=atb.RotaryConfig())
    x = torch.randn(1, sum(LENGTHS), 48, requires_grad=True)
    starts = _starts(LENGTHS)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    packed = layer(x, position_ids=positions, overlays=Overlays(starts, starts))
    alone = torch.cat([layer(part) for part in x.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(packed)
    (ours,) = torch.autograd.grad((packed * weight).sum(), x)
    (theirs,) = torch.autograd.grad((alone * weight).sum(), x)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_tokens_of_one_image_see_each_other():
    torch.manual_seed(0)
    layer = atb.TransformerLayer(32, 4, 8, 64)
    x = torch.randn(1, 9, 32)
    ids = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1]])
    before = layer(x, overlays=Overlays(image_ids=ids))
    changed = x.clone()
    changed[:, 4] += 1.0
    moved = (layer(changed, overlays=Overlays(image_ids=ids)) - before).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [False, False, True, True, True, True, True, True, True]
    assert torch.equal(layer(x), layer(x, overlays=Overlays(image_ids=torch.full((1, 9), -1))))


def test_what_does_not_go_with_a_cache_is_refused():
    layer = atb.TransformerLayer(32, 4, 8, 64, mode="inference")
    with pytest.raises(ValueError, match="overlays is given with kv_cache"):
        layer(torch.randn(1, 3, 32), use_cache=True, overlays=Overlays(image_ids=torch.zeros(1, 3, dtype=torch.long)))
    with pytest.raises(TypeError, match="overlays"):
        layer(torch.randn(1, 3, 32), overlays=torch.zeros(1))

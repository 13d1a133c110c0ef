"""What is no argument of multimodal attention: the error names it, whatever came."""

from __future__ import annotations

import pytest
import torch

from atb_modules import KVCacheManager, RotaryConfig
from atb_modules.multimodal import MultiModalAttention, MultiModalConfig, MultiModalLayout, MultiModalTransformerLayer
from atb_modules.multimodal.attention import MultiModalSpec, unified_mask

BOTH = MultiModalConfig(vision_rotary=RotaryConfig(), text_rotary=RotaryConfig())
SIZES = {"vision_seq_len": 6, "text_seq_len": 8, "multimodal": BOTH}


@pytest.fixture(scope="module")
def streams():
    torch.manual_seed(0)
    return torch.randn(2, 5, 32), torch.randn(2, 7, 32)


@pytest.fixture(scope="module", params=["attention", "layer"])
def module(request):
    if request.param == "attention":
        return MultiModalAttention(num_heads=4, head_dim=8, **SIZES)
    return MultiModalTransformerLayer(hidden_size=32, num_heads=4, **SIZES)


@pytest.mark.parametrize("name", ["vision_lengths", "text_lengths", "image_lengths"])
@pytest.mark.parametrize(
    "value",
    [5, 1.5, "ab", object(), [None, None], [5], torch.tensor([1.0, 2.0]), torch.zeros(2, device="meta"), [1.5, 2]],
)
def test_lengths_are_named(module, streams, name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        module(*streams, **{name: value})


def test_image_lengths_may_be_a_tensor(module, streams):
    images = [[2, 3], [1, 4]]
    got = module(*streams, image_lengths=torch.tensor(images))
    for one, other in zip(got, module(*streams, image_lengths=images), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "tables",
    [
        (torch.zeros(5, 4), torch.zeros(5, 3)),
        (torch.zeros(5, 9), torch.zeros(5, 9)),
        (torch.zeros(4, 4), torch.zeros(4, 4)),
        torch.zeros(5, 4),
    ],
)
def test_tables_are_named(module, streams, tables):
    with pytest.raises((ValueError, TypeError), match="vision_tables"):
        module(*streams, vision_tables=tables)


@pytest.mark.parametrize("cached", [False, True])
def test_streams_of_two_dtypes_are_refused_with_and_without_a_cache(module, streams, cached):
    vision, text = streams
    cache = KVCacheManager(32, 4, 1, 4, 8, torch.float32, num_pages=16) if cached else None
    with pytest.raises(TypeError, match="vision is torch.bfloat16; text is torch.float32"):
        module(vision.bfloat16(), text, kv_cache=cache)
    with torch.autocast("cpu", torch.bfloat16):  # which makes them one
        for out in module(vision.bfloat16(), text):
            assert torch.isfinite(out).all()


def test_masks_and_lengths_of_a_device_without_data_are_named(module, streams):
    with pytest.raises(ValueError, match="vision_mask is on meta"):
        module(*streams, vision_mask=torch.ones(2, 5, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match="vision_lengths is given and vision is on meta"):
        module.to_empty(device="meta")(*(part.to("meta") for part in streams), vision_lengths=[1, 2])
    module.to_empty(device="cpu")


@pytest.mark.parametrize(
    ("lengths", "name"),
    [
        ((3, 4), "vision_lengths"),
        (([1], None), "text_lengths"),
        (([1], [2], 3), "image_lengths"),
        (([1], [2], [3]), r"image_lengths\[0\]"),
        (([1], [2], [["a"]]), r"image_lengths\[0\]\[0\]"),
    ],
)
def test_a_layout_names_its_lengths(lengths, name):
    with pytest.raises((ValueError, TypeError), match=name):
        MultiModalLayout.from_lengths(*lengths)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((3, 4, 5), "spec"),
        ((MultiModalSpec(), -1, 3), "vision_len"),
        ((MultiModalSpec(), 2, 3.5), "text_len"),
        ((MultiModalSpec(), 2, 3, 5), "layout"),
        ((MultiModalSpec(), 2, 3, MultiModalLayout.from_lengths([5], [3])), "cu_vision"),
    ],
)
def test_the_unified_mask_names_its_arguments(arguments, name):
    with pytest.raises((ValueError, TypeError), match=name):
        unified_mask(*arguments)

"""Text that grows in a cache over vision that was computed once: equal to attention over all of it anew."""

from __future__ import annotations

import pytest
import torch

from atb_modules import AttentionConfig, KVCacheManager, RotaryConfig
from atb_modules.attention import RotaryEmbedding
from atb_modules.multimodal import MultiModalAttention, MultiModalConfig, MultiModalLayout
from atb_modules.testing import fresh_generator

from .formula import MODES

ROTARY = MultiModalConfig(vision_rotary=RotaryConfig(base=50.0), text_rotary=RotaryConfig(base=100.0))


def build(**options):
    torch.manual_seed(0)
    module = MultiModalAttention(20, 40, 4, 8, 24, **{"num_kv_heads": 2, "multimodal": ROTARY, **options})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def make_cache(layers=1, dtype=torch.float32, **options):
    return KVCacheManager(96, 5, layers, 4, 8, dtype, num_kv_heads=2, num_pages=80, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", ["after_vision", "zero"])
@pytest.mark.parametrize("ragged", [False, True])
def test_steps_equal_one_call(mode, ragged, start):
    generator = fresh_generator()
    positions = MultiModalConfig(vision_rotary=ROTARY.vision_rotary, text_rotary=ROTARY.text_rotary, text_start=start)
    module = build(cross_attention_mode=mode, multimodal=positions)
    cache = make_cache()
    vision, text = torch.randn(3, 12, 24, generator=generator), torch.randn(3, 17, 24, generator=generator)
    images = [[12], [0], [4, 5]] if ragged else [[12], [12], [7, 5]]
    own = [sum(lengths) for lengths in images]
    prompt = [8, 3, 5] if ragged else [8, 8, 8]
    options = {"vision_lengths": own, "image_lengths": images}
    first = module(vision, text[:, :8], **options, text_lengths=prompt, kv_cache=cache)
    alone = module(vision, text[:, :8], **options, text_lengths=prompt)
    for got, want in zip(first, alone, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    stored = mode in ("text_see_vision", "both")
    assert cache.lengths == tuple(a * stored + b for a, b in zip(own, prompt, strict=True))
    for count in (1, 1, 4, 1):  # tokens, and a longer piece
        rows = [slice(n, n + count) for n in prompt]
        new = torch.stack([text[row, part] for row, part in enumerate(rows)])
        nothing, out = module(None, new, kv_cache=cache)
        assert nothing.shape == (3, 0, 24)
        prompt = [n + count for n in prompt]
        whole = module(vision, text, **options, text_lengths=prompt)[1]
        want = torch.stack([whole[row, part] for row, part in enumerate(rows)])
        torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)
    assert not [name for name, _ in module.named_buffers()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["flash", "sdpa", "eager", "reference"])
def test_every_attention_type_serves_a_cache(mode, kind):
    generator = fresh_generator()
    module = build(cross_attention_mode=mode, attention_type=kind)
    vision, text = torch.randn(2, 6, 24, generator=generator), torch.randn(2, 5, 24, generator=generator)
    images, cache = [[2, 4], [6]], make_cache()
    first = module(vision, text[:, :3], image_lengths=images, kv_cache=cache)
    second = module(None, text[:, 3:], kv_cache=cache)[1]
    alone = build(cross_attention_mode=mode)
    want = alone(vision, text[:, :3], image_lengths=images)[0], alone(vision, text, image_lengths=images)[1]
    for got, right in zip((first[0], torch.cat([first[1], second], 1)), want, strict=True):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=2e-5)


def test_rows_of_a_cache_can_be_forked_reordered_and_cropped():
    generator = fresh_generator()
    module = build()
    vision, text = torch.randn(2, 9, 24, generator=generator), torch.randn(2, 6, 24, generator=generator)
    cache = make_cache()
    module(vision, text[:, :5], kv_cache=cache)
    cache.reorder([1, 0, 1])
    new = torch.randn(3, 1, 24, generator=generator)
    out = module(None, new, kv_cache=cache)[1]
    order = [1, 0, 1]
    want = module(vision[order], torch.cat([text[order, :5], new], 1))[1][:, -1:]
    torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)
    cache.crop(9 + 3)
    out = module(None, new, kv_cache=cache)[1]
    want = module(vision[order], torch.cat([text[order, :3], new], 1))[1][:, -1:]
    torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)


def test_a_later_image_of_a_conversation():
    """Text after it sees both images and the text between; text before it is as it was."""
    generator = fresh_generator()
    module = build(multimodal=None)
    one, two = torch.randn(1, 6, 24, generator=generator), torch.randn(1, 4, 24, generator=generator)
    early, late = torch.randn(1, 5, 24, generator=generator), torch.randn(1, 3, 24, generator=generator)
    cache = make_cache()
    module(one, early, kv_cache=cache)
    vision, text = module(two, late, kv_cache=cache)
    torch.testing.assert_close(vision, module(two, None)[0], atol=2e-5, rtol=2e-5)
    # without positions the order of images and text does not matter to what comes after all of them
    want = module(torch.cat([one, two], 1), torch.cat([early, late], 1), image_lengths=[[6, 4]])[1][:, -3:]
    torch.testing.assert_close(text, want, atol=2e-5, rtol=2e-5)


def test_layers_share_a_step_and_a_refused_call_leaves_the_cache():
    generator = fresh_generator()
    layers = [build(layer_idx=index) for index in range(2)]
    cache = make_cache(layers=2)
    vision, text = torch.randn(2, 9, 24, generator=generator), torch.randn(2, 6, 24, generator=generator)
    for layer in layers:
        layer(vision, text, kv_cache=cache)
    assert cache.lengths == (15, 15)
    step = cache.step([1, 1])
    for layer in layers:
        layer(None, text[:, :1], kv_cache=cache, cache_step=step)
    assert cache.lengths == (16, 16)
    with pytest.raises(ValueError, match=r"cache_step is of \(1, 1\) tokens; the call brings \(2, 2\)"):
        layers[0](None, text[:, :2], kv_cache=cache, cache_step=step)
    with pytest.raises(ValueError, match="batch 1; the cache has 2 open"):
        layers[0](None, text[:1], kv_cache=cache)
    assert cache.lengths == (16, 16)


def test_packed_calls_with_tables_of_the_caller():
    generator = fresh_generator()
    module = build()
    vision, text = torch.randn(2, 9, 24, generator=generator), torch.randn(2, 6, 24, generator=generator)
    one, two = make_cache(), make_cache()
    layout = MultiModalLayout.from_lengths([9, 4], [5, 2], [[3, 6], [4]])
    padded = module(vision, text, vision_lengths=[9, 4], text_lengths=[5, 2], image_lengths=[[3, 6], [4]], kv_cache=one)
    states = torch.cat([vision[0], vision[1, :4]]), torch.cat([text[0, :5], text[1, :2]])
    at = torch.cat([torch.arange(9), torch.arange(4)]), torch.tensor([9, 10, 11, 12, 13, 4, 5])
    tables = {
        "vision_tables": RotaryEmbedding(8, ROTARY.vision_rotary)(at[0]),
        "text_tables": RotaryEmbedding(8, ROTARY.text_rotary)(at[1]),
    }
    packed = module(*states, layout=layout, kv_cache=two, **tables)
    torch.testing.assert_close(packed[0], torch.cat([padded[0][0], padded[0][1, :4]]), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(packed[1], torch.cat([padded[1][0, :5], padded[1][1, :2]]), atol=2e-6, rtol=2e-6)
    step = {"layout": MultiModalLayout.from_lengths([0, 0], [1, 0])}
    table = RotaryEmbedding(8, ROTARY.text_rotary)(torch.tensor([14]))
    got = module(None, text[0, 5:], **step, kv_cache=two, text_tables=table)[1]
    want = module(None, text[:, 5:], text_lengths=[1, 0], kv_cache=one)[1]
    torch.testing.assert_close(got, want[0], atol=2e-6, rtol=2e-6)
    assert one.lengths == two.lengths == (15, 6) and not want[1].any()


def test_bfloat16_pages():
    generator = fresh_generator()
    module = build().bfloat16()
    cache = make_cache(dtype=torch.bfloat16)
    vision, text = (torch.randn(2, n, 24, generator=generator).bfloat16() for n in (9, 6))
    module(vision, text[:, :5], kv_cache=cache)
    out = module(None, text[:, 5:], kv_cache=cache)[1]
    want = module.float()(vision.float(), text.float())[1][:, 5:]
    scale = float(want.detach().abs().max())
    torch.testing.assert_close(out.float() / scale, want / scale, atol=2e-2, rtol=0)


def test_refusals():
    text = torch.zeros(1, 4, 24)
    with pytest.raises(ValueError, match="config.causal False has no cache"):
        build(config=AttentionConfig(causal=False))(None, text, kv_cache=make_cache())
    with pytest.raises(ValueError, match="kv_cache has 4 kv heads of 8 channels; this attention has 2"):
        build()(None, text, kv_cache=KVCacheManager(96, 5, 1, 4, 8, torch.float32))
    with pytest.raises(ValueError, match="kv_cache has window 6 in layer 0; allowed: None"):
        build()(None, text, kv_cache=make_cache(window=6))
    with pytest.raises(ValueError, match="layer_idx is 3, the cache has layers 0 to 0"):
        build(layer_idx=3)(None, text, kv_cache=make_cache())


@pytest.mark.parametrize(("mode", "start"), [("text_see_vision", "zero"), ("none", "after_vision")])
def test_a_refused_call_leaves_the_positions(mode, start):
    generator = fresh_generator()
    options = {"text_rotary": ROTARY.text_rotary, "text_start": start}
    module = build(cross_attention_mode=mode, multimodal=MultiModalConfig(**options))
    vision, text = torch.randn(1, 3, 24, generator=generator), torch.randn(1, 9, 24, generator=generator)
    cache = make_cache()
    module(vision, text[:, :4], kv_cache=cache)
    before = cache.lengths, cache.next_positions
    with pytest.raises(ValueError, match="text_tables has 5 angles"):
        tables = torch.ones(5, 5), torch.ones(5, 5)
        module(vision, text[:, 4:], kv_cache=cache, text_tables=tables)
    assert (cache.lengths, cache.next_positions) == before
    out = module(None, text[:, 4:], kv_cache=cache)[1]
    torch.testing.assert_close(out, module(vision, text)[1][:, 4:], atol=2e-5, rtol=2e-5)

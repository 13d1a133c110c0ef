"""Which strategy AUTO takes and that it says so, what each holds in memory, and the calls that are refused."""

from __future__ import annotations

import logging

import pytest
import torch

from atb_modules import explain, use_strategy
from atb_modules.multimodal import MultiModalLayout, MultiModalSpec, multimodal_attention
from atb_modules.multimodal.attention import unified_mask
from atb_modules.strategies import MultiModalStrategy
from atb_modules.testing import fresh_generator, peak_memory

from .formula import draw


@pytest.mark.parametrize("backward", [False, True])
def test_holds_less_than_one_masked_call(backward):
    generator = fresh_generator()
    sides = [tuple(t.requires_grad_(backward) for t in side) for side in draw(generator, 288, 1024, 4, 4, 64, batch=1)]
    mask = unified_mask(MultiModalSpec(), 288, 1024)

    def run(outs):
        return torch.autograd.grad(sum(out.sum() for out in outs), [*sides[0], *sides[1]]) if backward else outs

    def masked():
        q, k, v = (torch.cat(parts, 2) for parts in zip(*sides, strict=True))
        return run([torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)])

    most = peak_memory(masked)
    for strategy, share in (("three_call", 0.8), ("auto", 0.9), ("prefix", 0.9)):
        assert peak_memory(lambda word=strategy: run(multimodal_attention(*sides, strategy=word))) < share * most


def test_auto_is_explained_and_logged_once(caplog):
    generator = fresh_generator()
    sides = draw(generator, 576, 600, 2, 2, 32, batch=1)
    table = explain(multimodal_attention, *sides)
    assert "multimodal_attention" in str(table) and table.chosen()["multimodal_attention"][0] in (
        "three_call",
        "prefix",
    )
    assert explain("multimodal_attention", *sides).chosen in ("three_call", "prefix")
    with caplog.at_level(logging.INFO, logger="atb_modules.kernels"):
        for _ in range(2):
            multimodal_attention(*sides, MultiModalSpec(scale=0.123))
    lines = [line for line in caplog.messages if line.startswith("multimodal_attention -> ")]
    assert len(lines) == 1
    with use_strategy(multimodal="unified"):
        assert explain(multimodal_attention, *sides).chosen()["multimodal_attention"] == ("unified",)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"strategy": "four_call"}, ValueError, "strategy is 'four_call'; allowed: 'auto'"),
        ({"attention_strategy": "sdpa", "strategy": "three_call"}, ValueError, "does not return the LSE"),
        ({"spec": "both"}, TypeError, "spec is 'both'"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5"),
        ({"vision": 3}, TypeError, "vision is int; allowed: the tuple"),
        ({"vision_tokens": 5}, ValueError, "vision's k has 4 tokens; its q has 5"),
        ({"heads": 3}, ValueError, "vision's q has 4 heads of 16 and text's 3 of 16"),
        ({"dtype": torch.float64}, TypeError, "vision's q is torch.float32"),
    ],
)
def test_refusals(change, error, words):
    generator = torch.Generator().manual_seed(0)
    vision, text = draw(generator, 4, 6, batch=1)
    options = {key: value for key, value in change.items() if key in ("strategy", "attention_strategy", "dropout_p")}
    if "vision" in change:
        vision = change["vision"]
    if "vision_tokens" in change:
        vision = (torch.randn(1, 4, 5, 16), *vision[1:])
    if "heads" in change:
        text = (text[0][:, :3], *text[1:])
    if "dtype" in change:
        text = tuple(t.double() for t in text)
    with pytest.raises(error, match=words):
        multimodal_attention(vision, text, change.get("spec", MultiModalSpec()), **options)


def test_refused_layouts():
    with pytest.raises(ValueError, match=r"image_lengths\[1\] is \[4, 4\], 8 tokens; row 1 has 10"):
        MultiModalLayout.from_lengths([8, 10], [3, 3], [[8], [4, 4]])
    with pytest.raises(ValueError, match="vision_lengths has 2 rows and text_lengths 1"):
        MultiModalLayout.from_lengths([8, 10], [3])
    with pytest.raises(ValueError, match=r"cu_images lacks \[8\]"):
        starts = torch.tensor([0, 8, 18], dtype=torch.int32)
        MultiModalLayout(starts, starts, torch.tensor([0, 9, 18], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cu_text is \[0, 3, 6\]; allowed: 0, rising, up to 7 tokens"):
        sides = draw(torch.Generator(), 18, 7)
        multimodal_attention(*sides, layout=MultiModalLayout.from_lengths([8, 10], [3, 3]))
    with pytest.raises(ValueError, match="cross_attention_mode is 'all'; allowed: 'text_see_vision'"):
        MultiModalSpec("all")


def test_strategy_words():
    assert [member.value for member in MultiModalStrategy] == ["auto", "reference", "three_call", "prefix", "unified"]

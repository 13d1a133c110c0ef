"""M-RoPE positions: a table of transformers 4.57 ("max"), the installed release ("spatial"), and properties."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

import atb_modules as atb
from atb_modules.multimodal.mrope import VisionBlock, mrope_positions

# Whole seconds a time step alone: 4.57 truncates fractions before it multiplies, where Qwen multiplies first.
TABLE = json.loads((Path(__file__).parent / "data" / "mrope_transformers_4_57.json").read_text())


def blocks_of(parts):
    token, blocks = 0, []
    for kind, size, *step in parts:
        if kind == "text":
            token += size
        else:
            blocks.append(VisionBlock(token, tuple(size), step[0]))
            token += blocks[-1].length
    return token, blocks


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_max_is_what_transformers_4_57_computes(family):
    layouts = [layout for layout in TABLE["layouts"] if layout["family"] == family]
    assert len(layouts) == 40
    for layout in layouts:
        length, blocks = blocks_of(layout["parts"])
        positions, shifts = mrope_positions(length, blocks, advance="max")
        assert positions.tolist() == layout["positions"], layout["parts"]
        assert shifts[-1][1] == layout["delta"]


def random_layout(rnd, frames_apart, rate):
    """Parts of a random row, and what the installed release is asked with."""
    parts, kinds, images, videos, seconds = [["text", rnd.randrange(0, 5)]], [], [], [], []
    for _ in range(rnd.randrange(1, 4)):
        h, w = rnd.randrange(1, 5), rnd.randrange(1, 5)
        if rnd.random() < 0.5:
            images.append([1, 2 * h, 2 * w])
            parts.append(["image", [1, h, w], 1.0])
        else:
            t, second = rnd.randrange(1, 6), rnd.choice([0.25, 0.5, 1.0, 1.5, 2.0])
            videos.append([t, 2 * h, 2 * w])
            seconds.append(second)
            if frames_apart:
                for frame in range(t):
                    parts += [["text", 1]] * bool(frame) + [["video", [1, h, w], 1.0]]
            else:
                parts.append(["video", [t, h, w], 1.0 if rate is None else second * rate])
        parts.append(["text", rnd.randrange(1, 4)])
    for kind, size, *_ in parts:
        count = size if kind == "text" else size[0] * size[1] * size[2]
        kinds += [("text", "image", "video").index(kind)] * count
    return parts, kinds, images, videos, seconds


@pytest.mark.parametrize(
    ("model", "frames_apart", "rate"),
    [(Qwen2VLModel, False, None), (Qwen2_5_VLModel, False, 2), (Qwen3VLModel, True, None)],
)
def test_spatial_is_what_the_installed_release_computes(model, frames_apart, rate):
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=rate)
    shell = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    shell.get_vision_position_ids = lambda *args, **options: model.get_vision_position_ids(shell, *args, **options)
    rnd = random.Random(3)
    for _ in range(150):
        parts, kinds, images, videos, seconds = random_layout(rnd, frames_apart, rate)
        more = {"second_per_grid_ts": torch.tensor(seconds)} if rate and seconds else {}
        expected, _ = model.get_rope_index(
            shell,
            torch.zeros(1, len(kinds), dtype=torch.int64),
            torch.tensor([kinds]),
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            **more,
        )
        length, blocks = blocks_of(parts)
        positions, shifts = mrope_positions(length, blocks, advance="spatial")
        assert torch.equal(positions, expected[:, 0]), parts
        assert not shifts or length + shifts[-1][1] == int(expected[0, 0, -1]) + 1, parts


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 4)),
        max_size=4,
    ),
    st.integers(0, 4),
)
def test_text_never_goes_back_and_stands_alike_on_all_axes(layout, tail):
    token, blocks, text = 0, [], []
    for before, time, high, wide, step in layout:
        text += range(token, token + before)
        blocks.append(VisionBlock(token + before, (time, high, wide), step))
        token += before + blocks[-1].length
    text += range(token, token + tail)
    positions, shifts = mrope_positions(token + tail, blocks)
    at_text = positions[:, text]
    assert torch.equal(at_text[0], at_text[1]) and torch.equal(at_text[0], at_text[2])
    assert (at_text[0].diff() > 0).all()
    for number, block in enumerate(blocks):
        inside = positions[:, block.start : block.start + block.length]
        assert block.start == 0 or (inside >= positions[:, : block.start].max()).all()
        begin, shift = shifts[number]
        if begin < token + tail and begin in text:
            assert positions[0, begin] == begin + shift


def test_fractions_of_a_second_are_multiplied_before_they_are_truncated():
    positions, _ = mrope_positions(5, [VisionBlock(0, (5, 1, 1), 0.5 * 3)])
    assert positions[0].tolist() == [0, 1, 3, 4, 6]


def test_blocks_that_overlap_or_pass_the_end_are_refused():
    with pytest.raises(ValueError, match=r"blocks has 4 tokens at 3; allowed: from 5"):
        mrope_positions(20, [VisionBlock(1, (1, 2, 2)), VisionBlock(3, (1, 2, 2))])
    with pytest.raises(ValueError, match="6 tokens"):
        mrope_positions(6, [VisionBlock(4, (1, 2, 2))])
    with pytest.raises(ValueError, match="advance is 'far'"):
        mrope_positions(6, [], advance="far")


@pytest.mark.parametrize(("section", "interleaved"), [((2, 3, 3), False), ((4, 2, 2), True)])
def test_equal_axes_are_plain_rotary_positions(section, interleaved):
    config = atb.RotaryConfig(mrope_section=section, mrope_interleaved=interleaved)
    position_ids = torch.randint(0, 900, (2, 7))
    plain = atb.RotaryEmbedding(16, atb.RotaryConfig())(position_ids)
    several = atb.RotaryEmbedding(16, config)(position_ids.expand(3, 2, 7), axes=True)
    for a, b in zip(plain, several, strict=True):
        assert torch.equal(a, b)


def test_sections_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"mrope_section is \(2, 3, 4\), 9 in all; allowed: 8"):
        atb.RotaryEmbedding(16, atb.RotaryConfig(mrope_section=(2, 3, 4)))
    with pytest.raises(ValueError, match="axis 1 reaches frequency 10 of 8"):
        atb.RotaryEmbedding(16, atb.RotaryConfig(mrope_section=(2, 4, 2), mrope_interleaved=True))
    with pytest.raises(ValueError, match="mrope_interleaved is True"):
        atb.RotaryConfig(mrope_interleaved=True)
    with pytest.raises(ValueError, match="axes is True and mrope_section None"):
        atb.RotaryEmbedding(16)(torch.zeros(3, 2, dtype=torch.int64), axes=True)
    rotary = atb.RotaryEmbedding(16, atb.RotaryConfig(mrope_section=(2, 3, 3)))
    with pytest.raises(ValueError, match=r"position_ids has shape \(2, 4\); allowed: \(3, ...\)"):
        rotary(torch.zeros(2, 4, dtype=torch.int64), axes=True)

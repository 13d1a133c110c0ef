"""Copies of a prompt keep their own images: beams and several answers, in transformers and in our generate."""

import pytest
import torch
import transformers

import atb_modules as atb
from atb_modules.integrations.transformers import register
from atb_modules.integrations.transformers_cache import PagedCache


@pytest.fixture
def two(batch_of):
    return batch_of("qwen2_vl", "sizes", padding="left")


def test_beams_over_our_attention_and_cache_equal_eager(checkpoint, two, tmp_path):
    register()
    eager, directory = checkpoint("qwen2_vl")
    ours = transformers.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="atb").eval()
    options = {"max_new_tokens": 8, "num_beams": 2, "num_return_sequences": 2, "do_sample": False, "pad_token_id": 0}
    expected = eager.generate(**two.theirs(), **options)
    assert torch.equal(ours.generate(**two.theirs(), **options), expected)
    cache = PagedCache(ours.config, max_seq_len=128)
    assert torch.equal(ours.generate(**two.theirs(), **options, cache=cache), expected)


def test_a_repeated_prompt_repeats_whole_images(checkpoint, batch_of):
    model = atb.load_inference_model(checkpoint("qwen2_vl")[1])
    batch = batch_of("qwen2_vl", "sizes", padding="left")
    alone = model.generate(**batch.ours(), max_new_tokens=8)
    grid = batch.visual["image_grid_thw"]
    first, second = batch.visual["pixel_values"].split(grid.prod(-1).tolist())
    twice = {
        "pixel_values": torch.cat([first, first, second, second]),
        "image_grid_thw": grid.repeat_interleave(2, 0),
        "attention_mask": batch.attention_mask.repeat_interleave(2, 0),
    }
    found = model.generate(batch.input_ids.repeat_interleave(2, 0), 8, **twice)
    assert torch.equal(found, alone.repeat_interleave(2, 0))

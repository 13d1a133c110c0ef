"""A Qwen2.5-VL of our parts beside transformers' own: a question about an image, and a second one about the same."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import torch
import transformers

import atb_modules as atb
from benchmarks.timing import Row, interleave, row

IMAGE, VIDEO, QUESTION = 4090, 4091, 24
#: 700 x 560 pixels
GRID = (1, 40, 50)


def _config() -> transformers.PretrainedConfig:
    text = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }
    vision = {
        "depth": 8,
        "hidden_size": 640,
        "intermediate_size": 1712,
        "num_heads": 10,
        "out_hidden_size": 512,
        "fullatt_block_indexes": [3, 7],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO
    )


def rows() -> list[Row]:
    """Times to the first token: cold, and behind an image that the cache has seen."""
    torch.manual_seed(0)
    theirs = transformers.Qwen2_5_VLForConditionalGeneration._from_config(_config(), attn_implementation="sdpa").eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours = atb.load_inference_model(Path(directory))
    assert isinstance(ours, atb.QwenVLModel)
    tokens = GRID[0] * GRID[1] * GRID[2] // 4
    image = {"pixel_values": torch.randn(4 * tokens, 1176), "image_grid_thw": torch.tensor([GRID])}

    def prompt(number: int) -> torch.Tensor:
        return torch.tensor([[5] * 8 + [IMAGE] * tokens + [6 + number] * QUESTION])

    prompts, numbers = [prompt(n) for n in range(2)], itertools.count(2)
    kinds = (prompts[0] == IMAGE).int()
    warm = ours.new_cache(2048)
    ours.generate(prompts[0], 1, cache=warm, **image)
    with torch.inference_mode():
        mine = ours(prompts[0], **image).logits
        peer = theirs(input_ids=prompts[0], mm_token_type_ids=kinds, **image).logits
    print(f"largest difference of the logits: {float((mine - peer).abs().max()):.1e}")

    def transformers_first() -> object:
        return theirs.generate(
            input_ids=prompts[1],
            attention_mask=torch.ones_like(prompts[1]),
            mm_token_type_ids=kinds,
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
            **image,
        )

    times = interleave(
        {
            "first question": lambda: ours.generate(prompts[1], 1, **image),
            "second question": lambda: ours.generate(prompt(next(numbers)), 1, cache=warm, **image),
            "transformers, sdpa": transformers_first,
        },
        7,
    )
    name = f"Qwen2.5-VL, first token behind {tokens} image tokens"
    return [
        row(name, times, "transformers, sdpa", "> 1", ours="first question"),
        row(f"{name}, seen before", times, "first question", ">= 5", ours="second question"),
    ]

"""What transformers' own processors make of text, pictures and videos, through our models as it is."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import atb_modules as atb
from atb_modules.multimodal.qwen_vl import QwenVLModel

from .conftest import FAMILIES, IMAGE, PINPOINTS, QWEN, VIDEO

SPECIAL = {"<image>": IMAGE, "<video>": VIDEO, "<start>": 152, "<end>": 153}
SIZES = [(61, 37), (33, 90), (20, 21), (130, 30)]


def tokenizer():
    words = {"<pad>": 0, "<unk>": 1, **{f"w{number}": number for number in range(3, 140)}, **SPECIAL}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"image_token": "<image>", "video_token": "<video>", "boi_token": "<start>", "eoi_token": "<end>"}
    names |= {"vision_start_token": "<start>", "vision_end_token": "<end>"}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=names,
        padding_side="left",
    )


def processor_of(family):
    words = tokenizer()
    if family == "gemma3":
        cut = tf.Gemma3ImageProcessor(size={"height": 24, "width": 24})
        return tf.Gemma3Processor(cut, words, image_seq_length=9)
    if family in ("llava", "llava_next"):
        sides = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
        options = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        if family == "llava":
            return tf.LlavaProcessor(tf.CLIPImageProcessor(**sides), words, **options)
        cut = tf.LlavaNextImageProcessor(**sides, image_grid_pinpoints=PINPOINTS)
        return tf.LlavaNextProcessor(cut, words, **options)
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    images = tf.Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": 1024}, **patches)
    kind = tf.Qwen3VLVideoProcessor if family == "qwen3_vl" else tf.Qwen2VLVideoProcessor
    videos = kind(size={"shortest_edge": 64, "longest_edge": 2048}, do_sample_frames=False, **patches)
    name = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    return getattr(tf, name[family])(images, words, videos)


def picture(number):
    generator = np.random.default_rng(number)
    return Image.fromarray(generator.integers(0, 256, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8))


def film(number, frames):
    return np.random.default_rng(number).integers(0, 256, (frames, 24, 40, 3), dtype=np.uint8)


def both(checkpoint, family):
    theirs, directory = checkpoint(family)
    ours = atb.load_inference_model(directory)
    if isinstance(ours, QwenVLModel):
        ours.config = dataclasses.replace(ours.config, mrope_advance="spatial")
    return theirs, ours


def compare(theirs, ours, inputs):
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits[real], theirs(**inputs).logits[real], atol=1e-4, rtol=1e-4)
    expected = theirs.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=8), expected)
    cache = ours.new_cache(256, page_size=8, num_pages=128)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=8, cache=cache), expected)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=8, cache=cache), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures(checkpoint, family):
    theirs, ours = both(checkpoint, family)
    mark = {"gemma3": "<start>"}.get(family, "<image>")
    text = [f"{mark} w5 w6 {mark} w3 {mark} w4", "w7 w8 w9", f"w10 {mark} w11 w12"]
    pictures = [[picture(0), picture(1), picture(2)], [], [picture(3)]]
    given = pictures if family == "gemma3" else [one for row in pictures for one in row]
    inputs = processor_of(family)(text=text, images=given, padding=True, return_tensors="pt")
    compare(theirs, ours, inputs.to("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone(checkpoint, family):
    theirs, ours = both(checkpoint, family)
    inputs = processor_of(family)(text=["w7 w8 w9", "w10"], padding=True, return_tensors="pt")
    compare(theirs, ours, inputs)


@pytest.mark.parametrize("family", QWEN)
def test_videos_between_pictures(checkpoint, family):
    theirs, ours = both(checkpoint, family)
    text = ["<video> w4 <image> w5 <video> w6", "<image> w6 <video> w7 w8"]
    inputs = processor_of(family)(
        text=text,
        images=[picture(0), picture(1)],
        videos=[film(0, 2), film(1, 6), film(2, 4)],
        padding=True,
        return_tensors="pt",
    )
    compare(theirs, ours, inputs)


def test_pictures_with_crops(checkpoint):
    theirs, ours = both(checkpoint, "gemma3")
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 3}
    text = ["w3 <start> w4", "w5 <start> <start> w6"]
    pictures = [[picture(3)], [picture(0), picture(1)]]
    inputs = processor_of("gemma3")(text=text, images=pictures, padding=True, return_tensors="pt", images_kwargs=crops)
    assert len(inputs["pixel_values"]) > 3
    compare(theirs, ours, inputs)


@pytest.mark.parametrize("family", QWEN)
def test_videos_of_odd_lengths(checkpoint, family):
    theirs, ours = both(checkpoint, family)
    films = [film(0, 3), film(1, 5)]
    text = ["w3 <video> w4", "<video> w5"]
    inputs = processor_of(family)(text=text, videos=films, padding=True, return_tensors="pt")
    compare(theirs, ours, inputs.to(torch.float32))

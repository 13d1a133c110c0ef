"""Packed patches against those that transformers' own processors cut."""

from __future__ import annotations

import torch
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor, convert_image_to_patches

from atb_modules.multimodal.vision import naflex_resize, pack_images, unpad_patches
from atb_modules.testing import fresh_generator


def test_naflex_processor_and_resize_make_the_same_grids():
    image = torch.randint(0, 256, (3, 70, 45), generator=fresh_generator(), dtype=torch.uint8)
    batch = Siglip2ImageProcessor()(image, return_tensors="pt")
    height, width = naflex_resize(70, 45)
    assert batch["spatial_shapes"].tolist() == [[height // 16, width // 16]]
    packed, grid = unpad_patches(batch["pixel_values"], batch["pixel_attention_mask"], batch["spatial_shapes"])
    assert packed.shape[0] == grid.prod() and packed.shape[1] == 3 * 16 * 16


def test_naflex_processor_makes_the_patches_that_pack_images_makes():
    images = [torch.randn(3, h, w, generator=fresh_generator()) for h, w in ((32, 48), (16, 64))]
    ours, grid = pack_images(images, 16, channels_last=True)
    assert grid.tolist() == [[1, 2, 3], [1, 1, 4]]
    assert torch.equal(ours, torch.cat([convert_image_to_patches(image, 16) for image in images]))


def test_qwen_processor_makes_the_patches_that_pack_images_makes():
    generator = fresh_generator()
    images = [torch.rand(3, h, w, generator=generator) for h, w in ((56, 84), (84, 28))]
    processor = Qwen2VLImageProcessor(do_resize=False, do_rescale=False, do_normalize=False)
    theirs = processor(images, return_tensors="pt")
    ours, grid = pack_images(images, 14, merge_size=2, temporal_patch_size=2)
    assert torch.equal(grid, theirs["image_grid_thw"])
    torch.testing.assert_close(ours, theirs["pixel_values"])

"""Small random vision-language models as transformers saves them, and batches of rows with images and videos."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import transformers as tf

from atb_modules.multimodal.vision.image_size import num_anyres_tokens

IMAGE, VIDEO = 150, 151
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
FAMILIES = ("llava", "llava_next", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QWEN = FAMILIES[3:]


def config_of(name):
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 152, "vision_end_token_id": 153}
    patches = {"depth": 3, "num_heads": 4, "patch_size": 4}

    def rope(section):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}}

    if name == "gemma3":
        changes = {"head_dim": 16, "sliding_window": 40, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}
        vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return tf.Gemma3Config(
            text_config={**text, **changes, "num_hidden_layers": 4},
            vision_config={**vision, "image_size": 24, "patch_size": 4},
            mm_tokens_per_image=9,
            image_token_index=IMAGE,
            boi_token_index=152,
            eoi_token_index=153,
            tie_word_embeddings=True,
        )
    if name in ("llava", "llava_next"):
        vision = tf.CLIPVisionConfig(
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=28,
            patch_size=7,
            projection_dim=16,
        )
        options = {"vision_config": vision, "text_config": tf.LlamaConfig(**text), "image_token_index": IMAGE}
        if name == "llava":
            return tf.LlavaConfig(**options, vision_feature_layer=-2)
        return tf.LlavaNextConfig(**options, image_grid_pinpoints=PINPOINTS)
    if name == "qwen2_vl":
        vision = {**patches, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return tf.Qwen2VLConfig(text_config={**text, **rope([2, 3, 3])}, vision_config=vision, **ids)
    vision = {**patches, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    if name == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return tf.Qwen2_5_VLConfig(text_config={**text, **rope([2, 3, 3])}, vision_config=vision, **ids)
    vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
    return tf.Qwen3VLConfig(text_config={**text, "head_dim": 16, **rope([4, 2, 2])}, vision_config=vision, **ids)


def stir(model):
    """Values that show in the logits for every parameter: some start as zeros, Gemma 3's projection among them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() and parameter.dim() > 1:
                parameter.normal_(std=0.02)
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """(transformers' model in eager attention, its directory) of a family."""
    made = {}

    def of(name):
        if name not in made:
            torch.manual_seed(FAMILIES.index(name))
            config = config_of(name)
            model = tf.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
            stir(model)
            directory = tmp_path_factory.mktemp(name)
            model.save_pretrained(directory)
            made[name] = model, directory
        return made[name]

    return of


@dataclass
class Batch:
    """What a processor would return, with the rows' lengths."""

    family: str
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    visual: dict[str, torch.Tensor] = field(default_factory=dict)

    def ours(self, mask=True):
        """Arguments of our forward."""
        more = {"attention_mask": self.attention_mask} if mask else {}
        return {"input_ids": self.input_ids, **more, **self.visual}

    def theirs(self):
        """Arguments of transformers' forward."""
        more = {}
        if self.family == "gemma3":
            more["token_type_ids"] = (self.input_ids == IMAGE).int()
        if self.family in QWEN:
            kinds = (self.input_ids == IMAGE).int() + 2 * (self.input_ids == VIDEO).int()
            more["mm_token_type_ids"] = kinds
        return {**self.ours(), **more}


def tokens_of(family, kind, size):
    """Placeholders of an image, or of each run of a video."""
    if family in ("llava", "gemma3"):
        return [16 if family == "llava" else 9]
    if family == "llava_next":
        return [num_anyres_tokens(*size, pinpoints=PINPOINTS, tile_size=28, patch_size=7)]
    if kind == "image":
        return [size[0] * size[1] // 4]
    time, high, wide = size
    return [high * wide // 4] * time if family == "qwen3_vl" else [time * high * wide // 4]


def compose(family, rows, *, padding="right", seed=0):
    """A batch of rows, each a list of token counts (text), ("image", size) and ("video", size).

    Sizes are (height, width) in patches, or in pixels for LLaVA-NeXT; a video's (time, height, width).
    """
    generator = torch.Generator().manual_seed(seed)
    lists, images, videos = [], [], []
    for row in rows:
        ids = []
        for part in row:
            if isinstance(part, int):
                ids += torch.randint(3, 140, (part,), generator=generator).tolist()
                continue
            kind, size = part
            (images if kind == "image" else videos).append(size)
            for number, count in enumerate(tokens_of(family, kind, size)):
                if number:
                    ids += torch.randint(3, 140, (2,), generator=generator).tolist()
                ids += [IMAGE if kind == "image" else VIDEO] * count
        lists.append(ids)
    longest = max(map(len, lists))
    input_ids = torch.zeros(len(lists), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for number, ids in enumerate(lists):
        where = slice(longest - len(ids), None) if padding == "left" else slice(0, len(ids))
        input_ids[number, where], mask[number, where] = torch.tensor(ids, dtype=torch.int64), 1
    visual = {}
    if family in QWEN:
        for key, grid_key, grids in (
            ("pixel_values", "image_grid_thw", [(1, *size) for size in images]),
            ("pixel_values_videos", "video_grid_thw", videos),
        ):
            if grids:
                visual[grid_key] = torch.tensor(grids)
                total = int(visual[grid_key].prod(-1).sum())
                visual[key] = torch.randn(total, 96, generator=generator)
    elif images:
        if family in ("llava", "gemma3"):
            side = 28 if family == "llava" else 24
            visual["pixel_values"] = torch.randn(len(images), 3, side, side, generator=generator)
        else:
            visual["pixel_values"] = torch.randn(len(images), 5, 3, 28, 28, generator=generator)
            visual["image_sizes"] = torch.tensor(images)
    return Batch(family, input_ids, mask, visual)


def sizes_of(family):
    """An endless list of image sizes of a family."""
    patches = [(4, 6), (8, 4), (4, 4), (2, 2)]
    pixels = [(40, 90), (20, 30), (70, 70), (90, 25)]
    return itertools.cycle(pixels if family == "llava_next" else patches)


@pytest.fixture(scope="session")
def batch_of():
    """Batches by family and what is in them."""

    def of(family, kind, **options):
        size = sizes_of(family)
        image = lambda: ("image", next(size))  # noqa: E731
        rows = {
            "one": [[5, image(), 6]],
            "sizes": [[3, image(), 5], [2, image(), 9]],
            "two_images": [[2, image(), 3, image(), 4]],
            "adjacent": [[2, image(), image(), 4]],
            "mixed": [[4, image(), 5], [12], [image(), 2, image(), 3]],
            "text": [[7], [12]],
            "video": [[3, ("video", (3, 4, 4)), 4, image(), 5], [2, image(), 3, ("video", (2, 4, 6)), 2]],
        }[kind]
        return compose(family, rows, **options)

    return of

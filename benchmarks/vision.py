"""Vision towers: 16 images of mixed sizes in one pack against transformers, and against their products alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

from atb_modules.convert.source import ConfigSource
from atb_modules.convert.vision import vision_family_of
from atb_modules.multimodal.vision import VisionTower, frame_starts, read_grids, unpad_patches, window_partition
from benchmarks.timing import Row, interleave, row

#: rows and columns in patches of the 16 images: thumbnails, screens, a banner, a receipt
GRIDS = [(16, 16), (12, 20), (24, 10), (8, 8), (20, 20), (16, 24), (6, 40), (40, 6)] * 2
HIDDEN, HEADS, LAYERS = 640, 8, 4
ROUNDS = 7


def rows() -> list[Row]:
    """Qwen2.5-VL's windows, Qwen2-VL's whole images, SigLIP2's padding, SigLIP's one size, how a window layer grows."""
    return _qwen2_5() + _qwen2() + _naflex() + _siglip() + _growth()


def _tower(model: torch.nn.Module) -> VisionTower:
    """Ours with a model's own weights."""
    config = model.config
    family = vision_family_of(config.model_type)
    assert family is not None
    tower = family.build(ConfigSource(config.to_dict(), "config")).requires_grad_(False).eval()
    theirs = dict(model.named_parameters())
    for name, slot in family.slots(tower).items():
        slot.copy_(theirs[name])
    return tower


def _qwen_options() -> dict:
    return {"depth": LAYERS, "num_heads": HEADS, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _windowed(full: tuple[int, ...]) -> torch.nn.Module:
    config = Qwen2_5_VLVisionConfig(
        **_qwen_options(),
        hidden_size=HIDDEN,
        intermediate_size=1712,
        out_hidden_size=64,
        window_size=112,
        fullatt_block_indexes=full,
        attn_implementation="sdpa",
    )
    return Qwen2_5_VisionTransformerPretrainedModel(config).eval()


@torch.inference_mode()
def _qwen2_5() -> list[Row]:
    model = _windowed((1, 3))
    tower = _tower(model)
    pixels, grid = _pack(GRIDS)
    whole = frame_starts(read_grids(grid)).tolist()
    windows = window_partition(read_grids(grid), 2, 4).cu_seqlens.tolist()
    starts = [whole if layer in (1, 3) else windows for layer in range(LAYERS)]
    return _compare("Qwen2.5-VL tower", model, tower, (pixels, grid), _floor(tower, pixels, starts))


@torch.inference_mode()
def _qwen2() -> list[Row]:
    config = Qwen2VLVisionConfig(
        **_qwen_options(), embed_dim=HIDDEN, hidden_size=64, mlp_ratio=4, attn_implementation="sdpa"
    )
    model = Qwen2VisionTransformerPretrainedModel(config).eval()
    tower = _tower(model)
    pixels, grid = _pack(GRIDS)
    starts = [frame_starts(read_grids(grid)).tolist()] * LAYERS
    return _compare("Qwen2-VL tower", model, tower, (pixels, grid), _floor(tower, pixels, starts))


@torch.inference_mode()
def _naflex() -> list[Row]:
    config = Siglip2VisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=2560,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        patch_size=14,
        num_patches=256,
        vision_use_head=False,
        attn_implementation="sdpa",
    )
    model = Siglip2VisionModel(config).eval()
    tower = _tower(model)
    shapes = torch.tensor(GRIDS)
    longest = int(shapes.prod(-1).max())
    mask = (torch.arange(longest) < shapes.prod(-1, keepdim=True)).int()
    padded = torch.randn(len(GRIDS), longest, 3 * 14 * 14)
    pixels, grid = unpad_patches(padded, mask, shapes)
    floor = _floor(tower, pixels, [frame_starts(read_grids(grid)).tolist()] * LAYERS)
    return _compare("SigLIP2 NaFlex tower", lambda *_: model(padded, mask, shapes), tower, (pixels, grid), floor)


@torch.inference_mode()
def _siglip() -> list[Row]:
    config = SiglipVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        image_size=224,
        patch_size=14,
        vision_use_head=False,
        attn_implementation="sdpa",
    )
    model = SiglipVisionModel(config).eval()
    tower = _tower(model)
    images = torch.randn(8, 3, 224, 224)
    patches = torch.randn(8, 256, 588)
    floor = _floor(tower, patches, [None] * LAYERS)
    return _compare("SigLIP tower, 8 images of 224 x 224", model, tower, (images,), floor, goal="> 1")


def _compare(
    name: str,
    model: Callable,
    tower: VisionTower,
    inputs: tuple[Tensor, ...],
    floor: Callable[[], None],
    goal: str = ">= 1.15",
) -> list[Row]:
    times = interleave(
        {"ours": lambda: tower(*inputs), "transformers SDPA": lambda: model(*inputs), "products + attention": floor},
        ROUNDS,
    )
    return [
        row(f"{name}, {LAYERS} layers", times, "transformers SDPA", goal),
        row(f"{name}, {LAYERS} layers", times, "products + attention", ">= 0.87"),
    ]


def _pack(grids: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    grid = torch.tensor([(1, *g) for g in grids])
    return torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 14 * 14), grid


def _floor(tower: VisionTower, patches: Tensor, starts: list) -> Callable[[], None]:
    """The tower's matrix products on contiguous inputs and SDPA over its segments, with nothing in between."""
    config = tower.config
    dim = config.hidden_size // config.num_heads
    lead = patches.shape[:-1]
    x = torch.randn(*lead, config.hidden_size)
    inner = torch.randn(*lead, config.intermediate_size)
    shape = (3, 1 if len(lead) == 1 else lead[0], config.num_heads, lead[-1], dim)
    q, k, v = torch.randn(shape)
    parameters = dict(tower.layers.named_parameters())

    def run() -> None:
        F.linear(patches, tower.patch_embed.proj.weight)
        for index, edges in enumerate(starts):
            for part in ("attention.qkv.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.up_proj"):
                weight = parameters.get(f"{index}.{part}.weight")
                if weight is not None:
                    F.linear(x, weight)
            F.linear(inner, parameters[f"{index}.mlp.down_proj.weight"])
            for begin, end in pairwise(edges) if edges else [(0, q.shape[2])]:
                F.scaled_dot_product_attention(q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end])

    return run


@torch.inference_mode()
def _growth() -> list[Row]:
    """Four times the patches in windows of 64: four times the time, not sixteen."""
    tower = _tower(_windowed(()))
    small, large = _pack([(32, 32)]), _pack([(64, 64)])
    times = interleave({"4,096 patches": lambda: tower(*large), "1,024 patches": lambda: tower(*small)}, ROUNDS)
    return [row("window layers: 1,024 against 4,096 patches", times, "4,096 patches", "<= 4.4", ours="1,024 patches")]


def remarks() -> list[str]:
    """What the ratios stand for."""
    return ["vision: products + attention is a floor; >= 0.87 of it is at most 1.15 times its time."]

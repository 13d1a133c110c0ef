"""Pictures: a photograph through a vision tower and into text, timed, and a small LLaVA that names digits.

The photograph is real, the tower's and the attention's weights are random: their times do not depend on them. The
digits' model is trained here, in about a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image
from torch import Tensor

mpl.use("Agg")

import matplotlib.pyplot as plt

from atb_modules.multimodal import MultiModalSpec, multimodal_attention
from atb_modules.multimodal.attention import unified_mask
from atb_modules.multimodal.projectors import PatchMerger
from atb_modules.multimodal.vision import PackedTower, VisionConfig, pack_images
from atb_modules.multimodal.vision.image_size import smart_resize
from examples import digits_vlm

OUTPUT = Path("build") / "demo"
PATCH, MERGE, TEXT, HEADS, DIM = 14, 2, 1024, 8, 64
LEAST_RIGHT = 0.95


def main() -> int:
    photograph()
    return 0 if digits() else 1


def seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of a few runs, after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def photograph() -> None:
    """A photograph at its own aspect ratio: patches, windowed tower, merger, attention beside text."""
    pixels = torch.from_numpy(np.array(load_sample_image("china.jpg"))).permute(2, 0, 1)
    high, wide = smart_resize(*pixels.shape[1:], patch_size=PATCH, merge_size=MERGE)
    image = F.interpolate(pixels[None].float(), (high, wide), mode="bicubic", antialias=True)[0] / 127.5 - 1.0
    patches, grid = pack_images([image], PATCH, merge_size=MERGE, temporal_patch_size=2)
    sizes = VisionConfig(
        "demo", 640, 6, 10, 1712, PATCH, temporal_patch_size=2, merge_size=MERGE, patch_bias=False, mlp_type="swiglu",
        norm_type="rmsnorm", rotary_base=10000.0, window=112, full_attention_layers=(2, 5),
    )  # fmt: skip
    tower, merger = PackedTower(sizes).eval(), PatchMerger(640, HEADS * DIM, MERGE, layernorm_type="rmsnorm")
    tokens = merger(tower(patches, grid))
    print(f"A photograph of {tuple(pixels.shape[1:])} pixels, resized to {(high, wide)}: grid {grid[0].tolist()}, ")
    print(f"{len(patches):,} patches, {len(tokens):,} tokens of {tokens.shape[-1]} channels")
    print(
        f"  tower of 6 layers (4 in windows) and merger: {1e3 * seconds(lambda: merger(tower(patches, grid))):.0f} ms"
    )
    vision, text = heads_of(tokens), heads_of(torch.randn(TEXT, HEADS * DIM))
    mask = unified_mask(MultiModalSpec(), len(tokens), TEXT)

    def unified() -> Tensor:
        q, k, v = (torch.cat(pair, 2) for pair in zip(vision, text, strict=True))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    ours = torch.cat(multimodal_attention(vision, text), 2)
    one, split = seconds(unified), seconds(lambda: multimodal_attention(vision, text))
    print(f"  its tokens and {TEXT:,} of text in one attention, {HEADS} heads of {DIM}:")
    print(f"    one call under one mask {1e3 * one:7.1f} ms")
    print(f"    split and merged by LSE {1e3 * split:7.1f} ms, {one / split:.2f}x, largest difference", end=" ")
    print(f"{(ours - unified()).abs().max():.1e}")


def heads_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, heads, tokens, head_dim), the same thing thrice: times do not depend on what is projected."""
    heads = x.reshape(1, len(x), HEADS, DIM).transpose(1, 2).contiguous()
    return heads, heads.clone(), heads.clone()


def digits() -> bool:
    """Trains the small LLaVA, prints how many held-out digits it names, saves some with its answers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are no work for two
    images, labels, held_out, names = digits_vlm.digits()
    model = digits_vlm.build()
    start = time.perf_counter()
    digits_vlm.train(model, images, labels)
    took = time.perf_counter() - start
    said = digits_vlm.answers(model, held_out)
    torch.set_num_threads(threads)
    right = [word == digits_vlm.NAMES[label] for word, label in zip(said, names.tolist(), strict=True)]
    share = sum(right) / len(right)
    print(f"\nA LLaVA of {sum(p.numel() for p in model.parameters()):,} parameters, trained on {len(images):,} digits")
    print(f"in {took:.0f} s, names {share:.1%} of {len(right)} that it never saw (at least {LEAST_RIGHT:.0%} asked)")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(4, 10, figsize=(10, 5))
    for axis, image, word, ok in zip(axes.flat, held_out, said, right, strict=False):
        axis.imshow(image[0], cmap="gray_r")
        axis.set_title(word, color="black" if ok else "red", fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(OUTPUT / "digits.png", dpi=100)
    print(f"Its answers to 40 of them: {OUTPUT / 'digits.png'}")
    return share >= LEAST_RIGHT


if __name__ == "__main__":
    sys.exit(main())

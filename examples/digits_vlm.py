"""A LLaVA of our parts that learns to name handwritten digits: real images (scikit-learn's), a minute on two cores."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import atb_modules as atb
from atb_modules.multimodal.llava import LlavaModel
from atb_modules.multimodal.projectors import MLPProjector
from atb_modules.multimodal.tiling import WholeImage
from atb_modules.multimodal.vision import ImageTower, PositionConfig, VisionConfig

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["<image>", "which", "digit", "is", "this", "?", "it", ".", *NAMES]
QUESTION, ANSWER = ["which", "digit", "is", "this", "?"], ["it", "is"]


def token_ids(words: list[str]) -> list[int]:
    return [WORDS.index(word) for word in words]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train images, train labels, held-out images, held-out labels); images (n, 1, 8, 8) in 0 to 1."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]
    return images[train], labels[train], images[held_out], labels[held_out]


def build(projector: nn.Module | None = None, tokens: int = 16) -> LlavaModel:
    """A tower of two layers for 8 x 8 pixels, a projector, a decoder of two layers."""
    torch.manual_seed(0)
    vision = VisionConfig(
        "digits", 64, 2, 4, 128, patch_size=2, in_channels=1, image_size=(8, 8), post_norm=True,
        last_is_normed=True, positions=PositionConfig((4, 4)),
    )  # fmt: skip
    rotary = atb.RotaryConfig()
    text = atb.ModelConfig("llama", len(WORDS), 64, 2, 4, 2, 16, 128, (None, None), (rotary, rotary), max_positions=64)
    projector = MLPProjector(64, 64) if projector is None else projector
    return LlavaModel(
        ImageTower(vision), projector, atb.DecoderModel(text), image_token_id=0, tiling=WholeImage(tokens)
    )


def train(model: LlavaModel, images: Tensor, labels: Tensor, *, epochs: int = 30, batch: int = 32) -> list[float]:
    """Losses of every step; only the name in the answer is learned, from the picture and the question."""
    prompt = token_ids(["<image>"] * model.tiling.tokens_per_image + QUESTION + ANSWER)
    names = torch.tensor(token_ids(NAMES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4, weight_decay=0.05)
    steps = epochs * -(-len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 7e-4, total_steps=steps)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(epochs):
        for picked in torch.randperm(len(images), generator=generator).split(batch):
            ids = torch.cat([torch.tensor(prompt).expand(len(picked), -1), names[labels[picked]].unsqueeze(1)], dim=1)
            target = ids.clone()
            target[:, :-1] = -100
            loss = model(ids, pixel_values=images[picked], labels=target).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return losses


def answers(model: LlavaModel, images: Tensor) -> list[str]:
    """What the model generates behind the question, over the paged cache."""
    prompt = token_ids(["<image>"] * model.tiling.tokens_per_image + QUESTION + ANSWER)
    rows = model.generate([prompt] * len(images), 1, pixel_values=images)
    return [WORDS[row[-1]] for row in rows]

"""VisionFamily: what the converter must know of one family of vision encoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.convert.directory import named
from atb_modules.convert.source import ConfigSource
from atb_modules.multimodal.vision import ImageTower, PackedTower, VisionConfig, VisionTower, build_tower
from atb_modules.multimodal.vision.selection import SelectLayer

from .names import VisionNames, tower_slots

#: Activations as transformers names them.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}


@dataclass(frozen=True)
class VisionFamily:
    """One family of vision checkpoints.

    Args:
        name: as ``VisionConfig.family``.
        model_types: ``model_type`` words of a vision configuration that it reads, old ones too.
        vision_config: a ``VisionConfig`` from transformers' vision configuration.
        names: foreign names of its tensors.
    """

    name: str
    model_types: tuple[str, ...]
    vision_config: Callable[[ConfigSource], VisionConfig]
    names: Callable[[VisionConfig], VisionNames]

    def read(self, config: ConfigSource) -> VisionConfig:
        """The structure that a vision configuration asks for; errors name its file."""
        return named(config, lambda: self.vision_config(config))

    def build(
        self,
        config: ConfigSource,
        *,
        select_layer: SelectLayer = None,
        final_norm: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ImageTower | PackedTower:
        """The tower of a vision configuration, with fresh weights.

        Raises:
            ValueError: a wrong or missing key, naming the file and the key.
        """
        vision = self.read(config)
        return build_tower(vision, select_layer=select_layer, final_norm=final_norm, device=device, dtype=dtype)

    def slots(self, tower: VisionTower) -> dict[str, Tensor]:
        """Every tensor of the family's files that the tower keeps, by name relative to the vision model's root.

        The values are views of the tower's memory in the file's shape: copy into them to load, read them to save.
        """
        return tower_slots(tower, self.names(tower.config))


def square(config: ConfigSource, key: str, default: int) -> tuple[int, int]:
    """A size given as one number or as (height, width)."""
    value = config.values.get(key)
    if isinstance(value, (list, tuple)):
        if len(value) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in value):
            raise config.error(f"{key} is {value!r}; allowed: a positive integer, or two")
        return value[0], value[1]
    side = config.count(key, default)
    return side, side


def one_size(config: ConfigSource, key: str, default: int) -> int:
    """A size given as one number or as equal ones."""
    value = config.values.get(key)
    if isinstance(value, (list, tuple)):
        if not value or any(side != value[0] for side in value):
            raise config.error(f"{key} is {value!r}; allowed: a positive integer, or equal ones")
        return ConfigSource({key: value[0]}, config.path).count(key)
    return config.count(key, default)


def depth(config: ConfigSource, key: str, default: int) -> int:
    """A number of layers."""
    return config.layers(key) if config.has(key) else default


def square_side(config: ConfigSource, key: str, default: int) -> int:
    """The side of a square table of positions, whose number of entries the key gives."""
    entries = config.count(key, default)
    side = math.isqrt(entries)
    if side * side != entries:
        raise config.error(f"{key} is {entries}; allowed: a square number")
    return side


def no_dropout(config: ConfigSource, *keys: str) -> None:
    """Raises where a checkpoint asks for a dropout, which towers have none of."""
    for key in keys:
        if config.number(key, 0.0):
            raise config.error(f"{key} is {config.number(key)}; a vision tower allows 0.0")

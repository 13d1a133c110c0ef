"""Whether a cache that a user brings fits a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atb_modules.attention import KVCacheManager

if TYPE_CHECKING:
    from atb_modules.models.config import ModelConfig


def check_cache(name: str, cache: KVCacheManager, config: ModelConfig, device: torch.device) -> None:
    """Raises where `cache`, given as the argument `name`, cannot hold the keys and values that the model needs.

    Raises:
        TypeError: not a KVCacheManager.
        ValueError: naming what the cache has and what the model has.
    """
    if not isinstance(cache, KVCacheManager):
        raise TypeError(f"{name} must be a KVCacheManager, got {type(cache).__name__}; model.new_cache() makes one")
    for what, has, needs in (
        ("layers", cache.num_layers, config.num_layers),
        ("key and value heads", cache.num_kv_heads, config.num_kv_heads),
        ("channels a head", cache.head_dim, config.head_dim),
    ):
        if has != needs:
            raise ValueError(f"{name} has {has} {what}; the model has {needs}")
    if cache.device != device:
        raise ValueError(f"{name} is on {cache.device}; the model is on {device}")
    for layer, (left, model_left) in enumerate(zip(cache.windows, config.windows, strict=True)):
        if left is not None and (model_left is None or left < model_left):
            raise ValueError(
                f"{name} has window {left} in layer {layer}; the model has {model_left} there, and needs no less"
            )

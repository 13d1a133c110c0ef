"""MultimodalFamily: what the converter must know of one family of vision-language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atb_modules.convert.families import FAMILIES, families_text, family_of_model_type
from atb_modules.convert.family import hf_name
from atb_modules.convert.source import ConfigSource
from atb_modules.layer import LayerMode
from atb_modules.models.config import ModelConfig
from atb_modules.models.decoder import DecoderModel
from atb_modules.models.slots import weight_slots
from atb_modules.multimodal.model import VisionLanguageModel

#: Sizes that a nested text_config leaves out where they are transformers' defaults.
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}


@dataclass(frozen=True)
class WeightGroup:
    """Weights that stand under one root in a checkpoint.

    Args:
        roots: what may stand before their names; the first is what is written.
        slots: each name, and the memory of ours that holds the weight.
    """

    roots: tuple[str, ...]
    slots: Mapping[str, Tensor]


@dataclass(frozen=True)
class Build:
    """How the model of a checkpoint is built."""

    tied: bool
    mode: LayerMode
    attention_type: str
    dtype: torch.dtype

    def decoder(self, config: ModelConfig) -> DecoderModel:
        config = replace(config, tie_word_embeddings=self.tied)
        return DecoderModel(config, mode=self.mode, attention_type=self.attention_type, device="meta", dtype=self.dtype)


@dataclass(frozen=True)
class MultimodalFamily:
    """One family of checkpoints.

    Args:
        name: its name.
        model_types: ``model_type`` words of config.json that it reads.
        build: the model of a config.json, without weights.
        groups: where the weights of such a model stand in a checkpoint, the language model's and its head's included.
    """

    name: str
    model_types: tuple[str, ...]
    build: Callable[[ConfigSource, Build], VisionLanguageModel]
    groups: Callable[[VisionLanguageModel], list[WeightGroup]]


def nested(source: ConfigSource, key: str) -> ConfigSource:
    """The object under a key, and the key in the errors about it."""
    values = source.mapping(key)
    if not values:
        raise source.error(f"the key {key!r} is missing")
    return ConfigSource(values, f"{source.path}: {key}")


def text_config(source: ConfigSource, default_type: str = "llama") -> ModelConfig:
    """The language model's configuration, of a text family that we know by itself."""
    text = nested(source, "text_config")
    model_type = text.word("model_type", default_type)
    family = family_of_model_type(model_type)
    if family is None:
        raise text.error(f"model_type {model_type!r} is not supported; allowed: {families_text()}")
    values = {**_TEXT_DEFAULTS.get(model_type, {}), **text.values}
    return family.config(ConfigSource(values, text.path))


def language_groups(
    model: VisionLanguageModel, roots: tuple[str, ...], head_roots: tuple[str, ...]
) -> list[WeightGroup]:
    """The weights of the language model and of its head, by transformers' names for its text family."""
    language = model.language
    family = FAMILIES[language.config.family]
    slots = {hf_name(family, ours): slot for ours, slot in weight_slots(language).items()}
    head = {name: slots.pop(name) for name in ("lm_head.weight",) if name in slots}
    return [
        WeightGroup(roots, {name.removeprefix("model."): slot for name, slot in slots.items()}),
        WeightGroup(head_roots, head),
    ]


def parameters(module: torch.nn.Module, names: Mapping[str, str], prefix: str = "") -> dict[str, Tensor]:
    """Our parameters by foreign names; ``names`` maps our submodules to theirs."""
    slots = {}
    for ours, parameter in module.named_parameters():
        part, kind = ours.rsplit(".", 1)
        slots[f"{prefix}{names[part]}.{kind}"] = parameter.detach()
    return slots

"""A directory of a vision-language model as one of ours, one tensor at a time, and back."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from atb_modules.checks import check_path, check_type
from atb_modules.convert.directory import (
    check_shapes,
    commonest_dtype,
    counted,
    listed,
    named,
    plain_names,
    same_tensors,
    with_end_tokens,
)
from atb_modules.convert.safetensors_files import SafetensorsSource
from atb_modules.convert.source import ConfigSource, parse_json
from atb_modules.layer import LayerMode
from atb_modules.models.draws import undrawn
from atb_modules.multimodal.model import VisionLanguageModel

from .families import multimodal_family_of
from .family import Build, WeightGroup

logger = logging.getLogger("atb_modules.convert")


def multimodal_config(path: Path) -> ConfigSource | None:
    """The config.json of a directory where it is a vision-language model's, else None."""
    file = path / "config.json"
    if not file.is_file():
        return None
    values = parse_json(file.read_bytes(), f"{file}: the file")
    if not isinstance(values, dict) or multimodal_family_of(str(values.get("model_type"))) is None:
        return None
    return ConfigSource(values, str(file))


def load_multimodal(
    path: Path, source: ConfigSource, mode: LayerMode, dtype: torch.dtype | None, attention_type: str
) -> VisionLanguageModel:
    """The model of a directory whose config.json is ``source``.

    Raises:
        FileNotFoundError, ValueError: files, keys or tensors that are missing or do not fit, by name. A tensor that the
            model has no place for raises where it belongs to a layer, and is listed in ``unused_tensors`` elsewhere.
    """
    family = multimodal_family_of(source.word("model_type", ""))
    assert family is not None
    tensors = SafetensorsSource.from_directory(path)
    stored = plain_names(tensors)
    dtype = dtype or commonest_dtype(tensors.infos.values())
    build = Build(_is_tied(source, stored, tensors), mode, attention_type, dtype)
    model = named(source, lambda: undrawn(lambda: family.build(source, build)))
    model.language.tie_weights()
    placed = _place(family.groups(model), stored, path)
    check_shapes(tensors, placed)
    model.unused_tensors = _check_unused(set(stored.values()) - set(placed), path)
    with torch.no_grad():
        for name, slot in placed.items():
            tensors.read_into(name, slot)
    tensors.close()
    model.checkpoint_config = dict(source.values)
    config = model.language.config
    ends = tuple(dict.fromkeys(config.eos_token_ids + source.token_ids("eos_token_id")))
    model.language.config = replace(config, eos_token_ids=with_end_tokens(ends, path))
    if mode is LayerMode.INFERENCE:
        model.requires_grad_(False)
        model.eval()
    return model


def _is_tied(source: ConfigSource, stored: dict[str, str], tensors: SafetensorsSource) -> bool:
    """Whether the head is the embedding: as the file says, unless it holds a head of its own. Files without a head
    that do not say are tied: published ones leave out what is the default of their family.
    """
    inner, outer = source.mapping("text_config").get("tie_word_embeddings"), source.values.get("tie_word_embeddings")
    untied = (inner if outer is None else outer) is False
    heads = [name for plain, name in stored.items() if plain.endswith("lm_head.weight")]
    if not heads:
        if untied:
            raise source.error("the tensor 'lm_head.weight' is missing, and tie_word_embeddings is false")
        return True
    embeds = [name for plain, name in stored.items() if plain.endswith("embed_tokens.weight")]
    return not untied and bool(embeds) and same_tensors(tensors, heads[0], embeds[0])


def _place(groups: list[WeightGroup], stored: dict[str, str], path: Path) -> dict[str, Tensor]:
    """Every slot by the name that its tensor is stored under; the root of a group is the one that most names fit."""
    placed, missing = {}, []
    for group in groups:
        root = max(group.roots, key=lambda root: sum(root + name in stored for name in group.slots))
        for name, slot in group.slots.items():
            if root + name in stored:
                placed[stored[root + name]] = slot
            else:
                missing.append(root + name)
    if missing:
        raise ValueError(f"{path}: {counted(missing, 'tensor')} missing: {listed(missing)}")
    return placed


def _check_unused(names: set[str], path: Path) -> tuple[str, ...]:
    unused = sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))
    inside = [name for name in unused if "layers." in name or "blocks." in name]
    if inside:
        raise ValueError(
            f"{path}: the configuration has no place for {counted(inside, 'tensor')} of its layers: {listed(inside)}"
        )
    if unused:
        logger.warning("%s: %s not used: %s", path, counted(unused, "tensor"), listed(unused))
    return tuple(unused)


def save_multimodal(model: VisionLanguageModel, directory: str | Path) -> Path:
    """Writes ``config.json`` and ``model.safetensors`` as transformers reads them; returns the path of the second.

    Raises:
        ValueError: the model was not read from a checkpoint, so that there is no config.json to write; or an index of
            other weights files is in the directory.
    """
    check_type("model", model, VisionLanguageModel)
    check_path("directory", directory)
    config: dict[str, Any] | None = model.checkpoint_config
    family = None if config is None else multimodal_family_of(str(config.get("model_type")))
    if config is None or family is None:
        raise ValueError(
            "model.checkpoint_config is None or of no known family; set it to the config.json of a model like this one"
        )
    directory = Path(directory)
    if (directory / "model.safetensors.index.json").exists():
        raise ValueError(f"directory {directory} has an index of other weights files; remove it first")
    tensors = {
        group.roots[0] + name: slot.contiguous() for group in family.groups(model) for name, slot in group.slots.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    values = {**config, "dtype": str(model.language.dtype).removeprefix("torch.")}
    tied = values["tie_word_embeddings"] = model.language.config.tie_word_embeddings
    if "tie_word_embeddings" in values.get("text_config", {}):
        values["text_config"] = {**values["text_config"], "tie_word_embeddings": tied}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return directory / "model.safetensors"

"""load_vision_tower: the vision part of a checkpoint becomes a tower, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atb_modules.checks import FLOATING, check_parameter_dtype, check_path
from atb_modules.convert.directory import check_shapes, counted, listed, read_object
from atb_modules.convert.safetensors_files import SafetensorsSource
from atb_modules.convert.source import ConfigSource
from atb_modules.models.draws import undrawn
from atb_modules.multimodal.vision import ImageTower, PackedTower
from atb_modules.multimodal.vision.selection import SelectLayer

from .families import vision_families_text, vision_family_of
from .family import VisionFamily


def load_vision_tower(
    directory: str | Path,
    *,
    select_layer: SelectLayer = None,
    final_norm: bool | None = None,
    dtype: torch.dtype | None = None,
) -> ImageTower | PackedTower:
    """The tower of a directory with config.json and safetensors: a vision model's, or that of a model around one.

    Args:
        directory: of the checkpoint; families in ``VISION_FAMILIES``.
        select_layer, final_norm: what the tower returns, see ``VisionTower``.
        dtype: of the parameters; None for that of the stored patch kernel.

    Tensors beside the tower's own under the vision model's root (pooling heads, mergers) are listed in the tower's
    ``unused_tensors``.

    Raises:
        FileNotFoundError: the directory, or a file that it names, is not there.
        ValueError: an unknown model_type, a wrong key, tensors that are missing or of another shape, naming them.
    """
    check_path("directory", directory)
    check_parameter_dtype(dtype)
    path = Path(directory)
    family, config = vision_source(path)
    tensors = SafetensorsSource.from_directory(path)
    root = find_root(family, config, tensors, path)
    marker = tensors.infos[root + _marker(family, config)]
    if dtype is None:
        if marker.dtype not in FLOATING:
            raise ValueError(f"{marker.path}: tensor {marker.name!r} holds integers; allowed: a floating dtype")
        dtype = marker.dtype
    options: dict[str, Any] = {"select_layer": select_layer, "final_norm": final_norm, "dtype": dtype}
    tower = undrawn(lambda: family.build(config, device="meta", **options))
    tower.unused_tensors = read_slots(family.slots(tower), tensors, root, path)
    tensors.close()
    return tower


def vision_source(directory: Path) -> tuple[VisionFamily, ConfigSource]:
    """The family and the vision configuration of a directory's config.json, which may be that of a model around it."""
    file = directory / "config.json"
    values = read_object(file)
    inner = values.get("vision_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise ValueError(f"{file}: vision_config is {inner!r:.80}; allowed: an object")
    outer_type = values.get("model_type")
    own: Mapping[str, Any] = inner if isinstance(inner, Mapping) else values
    source = ConfigSource(own, f"{file}: vision_config" if own is inner else str(file))
    # Old files leave the inner word out: the model's own stands for it then.
    word = source.word("model_type", outer_type if isinstance(outer_type, str) else "")
    family = vision_family_of(word)
    if family is None:
        raise source.error(f"model_type is {word!r}; allowed: {vision_families_text()}")
    return family, source


def _marker(family: VisionFamily, config: ConfigSource) -> str:
    return family.names(family.read(config)).marker


def find_root(family: VisionFamily, config: ConfigSource, tensors: SafetensorsSource, path: Path) -> str:
    """What stands before the vision model's names in the files: "", "vision_model.", "model.visual." or the like."""
    marker = _marker(family, config)
    roots = [name.removesuffix(marker) for name in tensors.infos if name == marker or name.endswith(f".{marker}")]
    if len(roots) != 1:
        found = ", ".join(f"{root}{marker}" for root in roots) or "none"
        raise ValueError(f"{path}: tensors that end in {marker!r}: {found}; allowed: one, the vision model's")
    return roots[0]


def read_slots(slots: Mapping[str, Tensor], tensors: SafetensorsSource, root: str, path: Path) -> tuple[str, ...]:
    """Copies every slot's tensor out of the files; returns the names under ``root`` that no slot takes.

    Raises:
        ValueError: tensors that are missing or of another shape, naming them, before anything is read.
    """
    missing = [root + name for name in slots if root + name not in tensors.infos]
    if missing:
        raise ValueError(f"{path}: {counted(missing, 'tensor')} missing: {listed(missing)}")
    check_shapes(tensors, {root + name: slot for name, slot in slots.items()})
    with torch.no_grad():
        for name, slot in slots.items():
            tensors.read_into(root + name, slot)
    return tuple(
        sorted(name for name in tensors.infos if name.startswith(root) and name.removeprefix(root) not in slots)
    )

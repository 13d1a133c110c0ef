"""What all readers of a checkpoint's directory share: its JSON files, the names of its tensors, words for errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .source import ConfigSource, parse_json
from .tensors import TensorInfo, TensorSource

T = TypeVar("T")

_COMPILED_PREFIX = "_orig_mod."


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not JSON, or no object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    values = parse_json(path.read_bytes(), f"{path}: the file")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a {type(values).__name__}; allowed: an object")
    return values


def with_end_tokens(ids: tuple[int, ...], directory: Path) -> tuple[int, ...]:
    """Token ids that end an answer, and those of the directory's generation_config.json, where it has one."""
    file = directory / "generation_config.json"
    if not file.exists():
        return ids
    return tuple(dict.fromkeys(ids + ConfigSource(read_object(file), str(file)).token_ids("eos_token_id")))


def named(source: ConfigSource, read: Callable[[], T]) -> T:
    """What ``read`` returns; an error of our own classes, which know no file, gets the file's name."""
    try:
        return read()
    except ValueError as error:
        if str(error).startswith(source.path):
            raise
        raise source.error(str(error)) from None


def plain_names(tensors: TensorSource) -> dict[str, str]:
    """The names of stored tensors by what they were before ``torch.compile`` wrapped the model."""
    return {name.replace(_COMPILED_PREFIX, ""): name for name in tensors.infos}


def commonest_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """The dtype of most values."""
    sizes: dict[torch.dtype, int] = {}
    for info in infos:
        sizes[info.dtype] = sizes.get(info.dtype, 0) + torch.Size(info.shape).numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def same_tensors(tensors: TensorSource, first: str, second: str) -> bool:
    """Whether two stored tensors are there and equal."""
    infos = tensors.infos
    if first not in infos or second not in infos or infos[first].shape != infos[second].shape:
        return False
    pair = [torch.empty(infos[name].shape, dtype=infos[name].dtype) for name in (first, second)]
    for name, tensor in zip((first, second), pair, strict=True):
        tensors.read_into(name, tensor)
    return torch.equal(*pair)


def check_shapes(tensors: TensorSource, slots: Mapping[str, Tensor]) -> None:
    """Raises a ValueError for a stored tensor of another shape than the memory it will be read into."""
    for name, slot in slots.items():
        info = tensors.infos[name]
        if info.shape != tuple(slot.shape):
            raise ValueError(
                f"{info.path}: tensor {name!r} has shape {info.shape}; the configuration makes it {tuple(slot.shape)}"
            )


def counted(names: list[str], what: str) -> str:
    """ "1 tensor", "2 tensors"."""
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"


def listed(names: list[str], most: int = 20) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

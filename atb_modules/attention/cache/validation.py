"""Checks at the edge of the paged cache: each returns the value in the form that the inside trusts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atb_modules.checks import LARGEST_COUNT

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_count(name: str, value: int, least: int = 1, most: int = LARGEST_COUNT) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return value


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r} ({type(dtype).__name__})")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    return dtype


def layer_windows(window: int | Sequence[int | None] | None, num_layers: int) -> tuple[int | None, ...]:
    """One left window a layer."""
    windows = (window,) * num_layers if window is None or isinstance(window, int) else _entries("window", window)
    if len(windows) != num_layers:
        raise ValueError(f"window has {len(windows)} entries, num_layers is {num_layers}")
    return tuple(None if entry is None else check_count("window", entry, least=0) for entry in windows)


def _entries(name: str, value: Any) -> tuple[Any, ...]:
    """What a list, tuple or other iterable holds; a number that is no int, a string and the like are none."""
    if isinstance(value, bool | str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be an int or hold ints, got {value!r:.80} ({type(value).__name__})")
    if isinstance(value, Tensor) and value.dim() != 1:
        raise ValueError(f"{name} must hold ints, got a tensor of shape {tuple(value.shape)}")
    return tuple(value)


def as_lengths(name: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """`count` lengths: one number stands for all."""
    if type(value) is int:
        lengths = (value,) * count
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        return lengths
    lengths = _entries(name, value)
    if len(lengths) != count:
        raise ValueError(f"{name} has {len(lengths)} entries, the cache has {count} rows for it")
    for entry in lengths:
        if type(entry) is not int:
            raise TypeError(f"{name} must hold ints, got {entry!r} ({type(entry).__name__})")
        if entry < 0:
            raise ValueError(f"{name} must not be negative, got {entry}")
    return lengths


def as_rows(name: str, rows: int | Iterable[int], batch_size: int, unique: bool = True) -> list[int]:
    """Row indices below `batch_size`."""
    indices = [rows] if isinstance(rows, int) else list(_entries(name, rows))
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{name} must hold ints, got {index!r} ({type(index).__name__})")
        if not 0 <= index < batch_size:
            raise ValueError(f"{name} has row {index}, the cache has {batch_size} open sequences")
    if unique and len(set(indices)) != len(indices):
        raise ValueError(f"{name} has a row twice: {indices}")
    return indices


def as_row(name: str, row: int, batch_size: int) -> int:
    """The index of one row below `batch_size`."""
    rows = as_rows(name, row, batch_size)
    if len(rows) != 1:
        raise ValueError(f"{name} must be one row, got {len(rows)}")
    return rows[0]


def as_tokens(token_ids: Sequence[int] | Tensor) -> list[int]:
    """Token ids of one sequence as Python ints."""
    if isinstance(token_ids, Tensor):
        if token_ids.dim() != 1 or token_ids.dtype not in INTEGERS:
            raise ValueError(
                f"token_ids must be integers of shape (tokens,), got {token_ids.dtype} {tuple(token_ids.shape)}"
            )
        return [int(token) for token in token_ids.tolist()]
    tokens = list(_entries("token_ids", token_ids))
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"token_ids must hold ints, got {token!r} ({type(token).__name__})")
    return tokens


def check_keys(salt: object, adapter: object, images: object) -> None:
    """What the keys of prefixes depend on besides tokens: two words, and pairs of a place and an image's content."""
    for name, word in (("salt", salt), ("adapter", adapter)):
        if word is not None and not isinstance(word, str):
            raise TypeError(f"{name} must be a str or None, got {word!r:.80} ({type(word).__name__})")
    if not isinstance(images, Sequence) or isinstance(images, str | bytes):
        raise TypeError(f"images must be a sequence of (token, content), got {type(images).__name__}")
    for image in images:
        if not isinstance(image, tuple) or len(image) != 2:
            raise TypeError(f"images must hold pairs (token, content), got {type(image).__name__}")
        check_count("the token of an image", image[0], least=-1)


def check_appended(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, the step and the cache need {shape}")
    if value.dtype != dtype:
        raise ValueError(f"{name} has dtype {value.dtype}, the cache holds {dtype}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, the cache on {device}")


def as_image_ids(name: str, image_ids: Tensor | None, total: int, device: torch.device) -> Tensor | None:
    """int64 (total,) on the cache's device, or None where no token belongs to an image."""
    if image_ids is None:
        return None
    if not isinstance(image_ids, Tensor) or image_ids.dtype not in (torch.int64, torch.int32):
        kind = image_ids.dtype if isinstance(image_ids, Tensor) else type(image_ids).__name__
        raise TypeError(f"{name} is {kind}; allowed: an int64 or int32 tensor, or None")
    if tuple(image_ids.shape) != (total,):
        raise ValueError(f"{name} has shape {tuple(image_ids.shape)}; query_lengths has {total} tokens in all")
    return image_ids.long().to(device) if bool((image_ids >= 0).any()) else None

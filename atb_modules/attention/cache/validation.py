"""Checks at the edge of the paged cache: each returns the value in the form that the inside trusts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_count(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r} ({type(dtype).__name__})")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    return dtype


def layer_windows(window: int | Sequence[int | None] | None, num_layers: int) -> tuple[int | None, ...]:
    """One left window a layer."""
    windows = (window,) * num_layers if window is None or isinstance(window, int) else tuple(window)
    if len(windows) != num_layers:
        raise ValueError(f"window has {len(windows)} entries, num_layers is {num_layers}")
    return tuple(None if entry is None else check_count("window", entry, least=0) for entry in windows)


def as_lengths(name: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """`count` lengths: one number stands for all."""
    if isinstance(value, int):
        lengths = (value,) * count
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        return lengths
    lengths = tuple(value)
    if len(lengths) != count:
        raise ValueError(f"{name} has {len(lengths)} entries, the cache has {count} rows for it")
    for entry in lengths:
        if not isinstance(entry, int):
            raise TypeError(f"{name} must hold ints, got {entry!r} ({type(entry).__name__})")
        if entry < 0:
            raise ValueError(f"{name} must not be negative, got {entry}")
    return lengths


def as_rows(name: str, rows: int | Iterable[int], batch_size: int, unique: bool = True) -> list[int]:
    """Row indices below `batch_size`."""
    indices = [rows] if isinstance(rows, int) else list(rows)
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{name} must hold ints, got {index!r} ({type(index).__name__})")
        if not 0 <= index < batch_size:
            raise ValueError(f"{name} has row {index}, the cache has {batch_size} open sequences")
    if unique and len(set(indices)) != len(indices):
        raise ValueError(f"{name} has a row twice: {indices}")
    return indices


def as_tokens(token_ids: Sequence[int] | Tensor) -> list[int]:
    """Token ids of one sequence as Python ints."""
    if isinstance(token_ids, Tensor):
        if token_ids.dim() != 1 or token_ids.is_floating_point() or token_ids.is_complex():
            raise ValueError(
                f"token_ids must be integers of shape (tokens,), got {token_ids.dtype} {tuple(token_ids.shape)}"
            )
        return [int(token) for token in token_ids.tolist()]
    tokens = list(token_ids)
    for token in tokens:
        if not isinstance(token, int):
            raise TypeError(f"token_ids must hold ints, got {token!r} ({type(token).__name__})")
    return tokens


def check_appended(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if value.shape != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, the step and the cache need {shape}")
    if value.dtype != dtype:
        raise ValueError(f"{name} has dtype {value.dtype}, the cache holds {dtype}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, the cache on {device}")

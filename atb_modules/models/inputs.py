"""What DecoderModel.forward is given, checked at its edge. Values are read on the CPU alone, never while traced."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.checks import check_tensor

INTEGERS = (torch.int64, torch.int32)
#: The label of a token that is not predicted.
IGNORED = -100


def check_position_ids(positions: Tensor, shape: torch.Size, attention_mask: Tensor | None, limit: int) -> None:
    """Raises unless `positions` are integers for (B, L) whose real ones are below `limit`."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"position_ids must be a Tensor, got {type(positions).__name__}")
    if positions.dtype not in INTEGERS:
        raise ValueError(f"position_ids is {positions.dtype}; allowed: int64, int32")
    fits = positions.dim() in (1, 2) and positions.shape[-1] == shape[1]
    if not fits or (positions.dim() == 2 and positions.shape[0] not in (1, shape[0])):
        raise ValueError(
            f"position_ids has shape {tuple(positions.shape)}; input_ids has {tuple(shape)}, allowed: one position a "
            "token, for each row or for all"
        )
    if torch.compiler.is_compiling() or positions.device.type != "cpu":
        return
    if attention_mask is not None:
        positions = positions.expand(shape)[attention_mask != 0]
    if not positions.numel():
        return
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= limit:
        raise ValueError(
            f"position_ids has positions from {low} to {high}; allowed: 0 to max_positions - 1 = {limit - 1}"
        )


def check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(ids).__name__}")
    if ids.dim() != 2 or ids.dtype not in INTEGERS:
        raise ValueError(f"{name} must be int64 or int32 (batch, seq), got {ids.dtype} {tuple(ids.shape)}")
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} has ids from {low} to {high}; vocab_size is {vocab_size}")


def check_beside_ids(ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None, vocab_size: int) -> None:
    """Raises unless attention_mask and labels are None or go with ids (B, L)."""
    for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
        if tensor is None:
            continue
        check_tensor(name, tensor, "a tensor (batch, seq) or None")
        if tensor.shape != ids.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; input_ids has {tuple(ids.shape)}")
        if tensor.device != ids.device:
            raise ValueError(f"{name} is on {tensor.device}; input_ids is on {ids.device}, they must be equal")
    if attention_mask is not None and (attention_mask.dtype.is_floating_point or attention_mask.dtype.is_complex):
        raise TypeError(f"attention_mask is {attention_mask.dtype}; allowed: bool or integers 0/1")
    if labels is None:
        return
    if labels.dtype not in INTEGERS:
        raise TypeError(f"labels is {labels.dtype}; allowed: int64, int32")
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        return
    outside = ((labels < 0) | (labels >= vocab_size)) & (labels != IGNORED)
    if bool(outside.any()):
        found = labels[outside]
        raise ValueError(
            f"labels has ids from {int(found.min())} to {int(found.max())} outside of the vocabulary; allowed: 0 to "
            f"vocab_size - 1 = {vocab_size - 1}, and {IGNORED} for a token that is not predicted"
        )

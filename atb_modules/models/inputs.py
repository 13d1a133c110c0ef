"""What DecoderModel.forward is given, checked at its edge. Values are read on the CPU alone, never while traced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.checks import check_tensor, check_type
from atb_modules.overlays import Overlays

INTEGERS = (torch.int64, torch.int32)
#: The label of a token that is not predicted.
IGNORED = -100


def check_position_ids(
    positions: Tensor, shape: torch.Size, attention_mask: Tensor | None, limit: int, axes: int | None
) -> None:
    """Raises unless `positions` are integers for (B, L) whose real ones are below `limit`; or one such an axis."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"position_ids must be a Tensor, got {type(positions).__name__}")
    if positions.dtype not in INTEGERS:
        raise ValueError(f"position_ids is {positions.dtype}; allowed: int64, int32")
    if positions.dim() == 3 and axes is not None:
        if positions.shape[0] != axes:
            raise ValueError(
                f"position_ids has shape {tuple(positions.shape)}; allowed: ({axes}, {shape[0]}, {shape[1]})"
            )
        for part in positions:
            check_position_ids(part, shape, attention_mask, limit, None)
        return
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


@dataclass(frozen=True, eq=False)
class Deepstack:
    """Features that join the stream after each of the first layers (DeepStack, Meng et al. 2024; Qwen3-VL).

    Args:
        index: int64 (n,), which tokens: their numbers in the flattened (batch, seq), or among the packed ones.
        features: one (n, hidden_size) for each of the first layers.
    """

    index: Tensor
    features: tuple[Tensor, ...]

    def joined(self, x: Tensor, layer: int) -> Tensor:
        """The stream x (..., hidden_size) behind a layer, with its features added; x itself has not changed."""
        if layer >= len(self.features):
            return x
        flat = x.reshape(-1, x.shape[-1])
        return flat.index_add(0, self.index, self.features[layer].to(x.dtype)).reshape(x.shape)

    def packed(self, real: Tensor) -> Deepstack:
        """The same over the real tokens (batch, seq) alone, packed row after row."""
        flat = real.flatten()
        if not bool(flat[self.index].all()):
            raise ValueError("deepstack has features for tokens that attention_mask hides; allowed: real tokens")
        return Deepstack((flat.cumsum(0) - 1)[self.index], self.features)


def check_stream(inputs_embeds: object, deepstack: object, hidden_size: int, num_layers: int) -> None:
    """Raises unless inputs_embeds is (B, L, hidden_size), and deepstack, where it is given, goes with it."""
    if not isinstance(inputs_embeds, Tensor) or not inputs_embeds.dtype.is_floating_point:
        kind = inputs_embeds.dtype if isinstance(inputs_embeds, Tensor) else type(inputs_embeds).__name__
        raise TypeError(f"inputs_embeds is {kind}; allowed: a floating tensor (batch, seq, {hidden_size})")
    shape = tuple(inputs_embeds.shape)
    if len(shape) != 3 or shape[2] != hidden_size:
        raise ValueError(f"inputs_embeds has shape {shape}; allowed: (batch, seq, {hidden_size})")
    if deepstack is None:
        return
    check_type("deepstack", deepstack, Deepstack)
    assert isinstance(deepstack, Deepstack)
    count = deepstack.index.numel()
    if len(deepstack.features) > num_layers:
        raise ValueError(f"deepstack has features for {len(deepstack.features)} layers; the model has {num_layers}")
    for number, features in enumerate(deepstack.features):
        if tuple(features.shape) != (count, hidden_size):
            raise ValueError(
                f"deepstack.features[{number}] has shape {tuple(features.shape)}; allowed: ({count}, {hidden_size}), "
                "one a token of index"
            )


def check_cached_overlays(overlays: Overlays | None, shape: torch.Size) -> None:
    """Raises unless overlays are None or the image_ids of a cached call's new tokens (B, L)."""
    if overlays is None:
        return
    if overlays.cu_seqlens_q is not None or overlays.block_mask is not None:
        raise ValueError(
            "overlays is given with past_key_values; allowed: image_ids alone, a cache has rows of its own"
        )
    if overlays.image_ids is not None and overlays.image_ids.shape != shape:
        raise ValueError(
            f"overlays.image_ids has shape {tuple(overlays.image_ids.shape)}; with past_key_values allowed: "
            f"{tuple(shape)}"
        )


def shifted_labels(labels: Tensor, overlays: Overlays | None) -> Tensor:
    """int64 (B, L - 1): what each token but the last predicts; nothing where the next one begins a packed sequence."""
    targets = labels[:, 1:].long()
    if overlays is None or overlays.cu_seqlens_q is None:
        return targets
    starts = overlays.cu_seqlens_q[1:-1].long()
    starts = starts[(starts > 0) & (starts < labels.shape[1])]
    return targets.index_fill(1, starts - 1, IGNORED)


def longest_row(length: int, cu_seqlens: Tensor | None) -> int:
    """Tokens of the longest sequence: of rows of that length, or of the packed ones."""
    return length if cu_seqlens is None else max(cu_seqlens.diff().tolist(), default=0)


def segment_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """(1, total): positions that begin at 0 in every packed sequence."""
    starts = cu_seqlens.long()
    begin = torch.repeat_interleave(starts[:-1], starts.diff(), output_size=total)
    return (torch.arange(total, device=starts.device) - begin).unsqueeze(0)


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

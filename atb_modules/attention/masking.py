"""Padding: from a user's attention_mask to what the ops take, and between padded and packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.checks import check_tensor


def expand_mask(attention_mask: Tensor | None, batch: int, kv_len: int) -> Tensor | None:
    """A mask that broadcasts to (batch, heads, q_len, kv_len): bool True = may attend, floating = added.

    A padding mask is (batch, kv_len) of bool or integers, 1 = real; (batch, q_len, kv_len) and four axes are passed on.
    A padding mask without padding becomes None, so that kernels without a mask can serve the call.
    """
    if attention_mask is None:
        return None
    check_tensor("attention_mask", attention_mask, "a tensor or None")
    if attention_mask.dim() == 2:
        if tuple(attention_mask.shape) != (batch, kv_len):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; a padding mask is ({batch}, {kv_len})"
            )
        real = _as_bool(attention_mask)
        if not torch.compiler.is_compiling() and real.device.type == "cpu" and bool(real.all()):
            return None
        return real[:, None, None, :]
    if attention_mask.dim() not in (3, 4):
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} axes; allowed: (batch, kv_len), (batch, q_len, kv_len) or "
            "(batch, heads, q_len, kv_len)"
        )
    if not attention_mask.dtype.is_floating_point:
        attention_mask = _as_bool(attention_mask)
    return attention_mask.unsqueeze(1) if attention_mask.dim() == 3 else attention_mask


def check_mask(name: str, mask: object, hidden_states: Tensor, kv_len: int, num_heads: int) -> None:
    """Raises unless ``mask``, the argument ``name``, is None or what ``expand_mask`` takes for this call."""
    if mask is None:
        return
    check_tensor(name, mask, "a tensor or None")
    assert isinstance(mask, Tensor)
    batch, q_len = hidden_states.shape[:2]
    full = {2: (batch, kv_len), 3: (batch, q_len, kv_len), 4: (batch, num_heads, q_len, kv_len)}.get(mask.dim())
    fits = full is not None and all(have in (1, want) for have, want in zip(mask.shape, full, strict=True))
    if not fits or (mask.dim() == 2 and tuple(mask.shape) != full):
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}; allowed: a padding mask ({batch}, {kv_len}), or what broadcasts to "
            f"({batch}, {q_len}, {kv_len}) or ({batch}, {num_heads}, {q_len}, {kv_len})"
        )
    if mask.dtype.is_complex or (mask.dtype.is_floating_point and mask.dim() == 2):
        raise TypeError(f"{name} is {mask.dtype} with {mask.dim()} axes; a padding mask is bool or integer 0/1")
    if mask.device != hidden_states.device:
        raise ValueError(f"{name} is on {mask.device}; hidden_states is on {hidden_states.device}")


def pack_padded(hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, list[int], Tensor]:
    """Real tokens of (batch, seq, hidden), one row after the other.

    Returns the packed (tokens, hidden), the real tokens of each row, and the bool (batch, seq) of real positions.
    """
    batch, length = hidden_states.shape[:2]
    if attention_mask is None:
        real = torch.ones(batch, length, dtype=torch.bool, device=hidden_states.device)
        return hidden_states.flatten(0, 1), [length] * batch, real
    check_tensor("attention_mask", attention_mask, "a tensor or None")
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; with a cache it is ({batch}, {length}), "
            "the real ones of the new tokens"
        )
    real = _as_bool(attention_mask)
    return hidden_states[real], real.sum(dim=1).tolist(), real


def unpack_padded(packed: Tensor, real: Tensor) -> Tensor:
    """The inverse of ``pack_padded``; positions that are not real become 0."""
    if packed.shape[0] == real.numel():
        return packed.reshape(*real.shape, packed.shape[-1])
    padded = packed.new_zeros(*real.shape, packed.shape[-1])
    padded[real] = packed
    return padded


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise TypeError(f"attention_mask is {mask.dtype} with two axes; a padding mask is bool or integer 0/1")
    return mask != 0

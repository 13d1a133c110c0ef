"""Softmax attention of one sequence, with the statistics that fused operators keep; layouts as lists of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.rules import lowest

COMPRESSED = 2048
PREFIX_ROWS = 3072


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masked: Tensor | None,
    scale: float,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    zero_rows: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, max, sum) of query (N, Sq, D) over key and value (Nkv, Skv, D), all float32, max and sum (N, Sq, 1).

    Scores are ``scale * (q k + bias)``. A masked score becomes the lowest finite number, not minus infinity: a row
    that is masked all over then averages the values (the documented loss of precision), unless ``zero_rows`` ("rows
    without effect are computed"), where it gives 0 and the statistics (lowest, largest). ``kept`` (N, Sq, Skv) is what
    dropout multiplies the weights by; the statistics know nothing of it.
    """
    scores = masked_scores(query, key, masked, scale, bias)
    if scores.shape[-1] == 0:
        zero = query.new_zeros(*query.shape[:-1], 1, dtype=torch.float32)
        out = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32)
        return out, zero + lowest(), zero - lowest()
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.float().view(-1, 1, 1))
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.float().view(-1, 1, 1) - top)
    if zero_rows:
        dead = (scores == lowest()).all(-1, keepdim=True)
        weights = weights.masked_fill(dead, 0.0)
        total = total.masked_fill(dead, -lowest())
        top = top.masked_fill(dead, lowest())
    weights = weights / total
    if kept is not None:
        weights = weights * kept
    return weights @ spread_heads(value, query.shape[0]), top, total


def masked_scores(query: Tensor, key: Tensor, masked: Tensor | None, scale: float, bias: Tensor | None) -> Tensor:
    """Scores (N, Sq, Skv) in float32, masked ones at the lowest finite number."""
    scores = query.float() @ spread_heads(key, query.shape[0]).transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.float()
    scores = scores * scale
    return scores if masked is None else scores.masked_fill(masked, lowest())


def spread_heads(tensor: Tensor, heads: int) -> Tensor:
    """(Nkv, S, D) in float32 with each head repeated for its group of query heads, neighbours sharing one."""
    return tensor.float().repeat_interleave(heads // tensor.shape[0], 0)


def split_sequences(tensor: Tensor, layout: str, heads: int, cumulative: Sequence[int] | None = None) -> list[Tensor]:
    """A tensor of any layout as a list of sequences (N, S, D); packed ones are cut at ``cumulative``."""
    if layout == "TND":
        starts = [0, *(cumulative or ())]
        return [tensor[a:b].transpose(0, 1) for a, b in zip(starts, cumulative or (), strict=False)]
    if layout == "BNSD":
        return list(tensor.unbind(0))
    if layout == "BSND":
        return list(tensor.transpose(1, 2).unbind(0))
    batch_first = tensor.transpose(0, 1) if layout == "SBH" else tensor
    return list(batch_first.unflatten(-1, (heads, -1)).transpose(1, 2).unbind(0))


def join_sequences(sequences: list[Tensor], layout: str, like: Tensor) -> Tensor:
    """The inverse of ``split_sequences``; packed rows that belong to no sequence are NaN: nothing wrote them."""
    width = sequences[0].shape[-1] if sequences else like.shape[-1]
    if layout == "TND":
        rows = [sequence.transpose(0, 1) for sequence in sequences]
        rest = like.shape[0] - sum(row.shape[0] for row in rows)
        tail = torch.full((rest, like.shape[1], width), float("nan"), dtype=torch.float32)
        joined = torch.cat([*rows, tail])
    else:
        joined = torch.stack(sequences)
        if layout != "BNSD":
            joined = joined.transpose(1, 2)
        if layout in ("BSH", "SBH"):
            joined = joined.flatten(2)
        if layout == "SBH":
            joined = joined.transpose(0, 1)
    return joined.contiguous().to(like.dtype)


def structure(mode: int, rows: int, columns: int, before: int, after: int, prefix: int = 0) -> Tensor:
    """Masked pairs (rows, columns) of a sparse mode: 2 left-up causal, 3 right-down causal, 4 band counted from the
    bottom-right, 6 (and 5) causal with a visible prefix. Drawn for 2 queries and 4 keys, x masked:

        mode 2: . x x x    mode 3: . . . x    mode 4, before 1, after 0: x . . x    mode 6, prefix 1: . . . x
                . . x x            . . . .                               x x . .                     . . . .
    """
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    if mode == 2:
        return j > i
    distance = j - i - (columns - rows)
    if mode == 4:
        return (distance > after) | (distance < -before)
    hidden = distance > 0
    return hidden & (j >= prefix) if mode in (5, 6) else hidden


def require_compressed(mask: Tensor | None, mode: int) -> None:
    """Modes 2, 3, 4, 7 and 8 read a 2048 x 2048 triangle, True above the diagonal; mode 6 a rectangle below it."""
    rows = PREFIX_ROWS if mode == 6 else COMPRESSED
    require(mask is not None, f"sparse_mode {mode} needs atten_mask")
    assert mask is not None
    shape = tuple(size for size in mask.shape if size != 1)
    require(shape == (rows, COMPRESSED), f"sparse_mode {mode} takes atten_mask ({rows}, 2048), got {tuple(mask.shape)}")
    expected = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu_(1)
    if mode == 6:
        below = torch.zeros(rows - COMPRESSED, COMPRESSED, dtype=torch.bool)
        below[:, COMPRESSED // 2 :] = True
        expected = torch.cat((expected, below))
    right = torch.equal(mask.reshape(rows, COMPRESSED).bool(), expected)
    require(right, f"atten_mask of sparse_mode {mode} is not the documented one: True (masked) above the diagonal")


def require_cumulative(name: str, lengths: Sequence[int], total: int) -> list[int]:
    """Cumulative lengths of packed sequences: not negative, never falling, not beyond ``total``; trailing zeros leave
    sequences out."""
    kept = list(lengths)
    while len(kept) > 1 and kept[-1] == 0:
        kept.pop()
    require(bool(kept), f"{name} is empty")
    rising = all(b >= a for a, b in zip([0, *kept], kept, strict=False))
    require(rising, f"{name} {list(lengths)[:8]} must be cumulative: lengths 2, 2, 2 are given as 2, 4, 6")
    require(kept[-1] <= total, f"{name} ends at {kept[-1]}, the tensor has {total} rows")
    return kept

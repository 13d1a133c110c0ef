"""Partial attentions over disjoint keys, joined exactly by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.checks import check_floating


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One softmax over all keys from the results of calls over parts of them (Milakov and Gimelshein, 2018).

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log sum_i exp(lse_i)``, in float32 (float64 for float64), and
    differentiable: gradients flow into every part's output and LSE, which gives each part the gradient of the merged
    softmax without a second forward. A row that no part sees is empty again: output 0, LSE -inf, gradients 0. Sinks
    belong to one of the parts, not to each.

    Args:
        outs: (batch, heads, q_len, value_dim) each, as ``attention(..., return_lse=True)`` returns them; or packed
            (total, heads, value_dim).
        lses: (batch, heads, q_len) each, natural logarithms; or packed (heads, total).

    Returns:
        (out, lse) in the dtype of the first output and in float32.

    Raises:
        ValueError, TypeError: no parts, not as many of both, or shapes and dtypes that differ.
    """
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, Sequence):
            raise TypeError(f"{name} is {type(given).__name__}; allowed: a sequence of tensors")
    outs, lses = list(outs), list(lses)
    _check(outs, lses)
    compute = torch.promote_types(outs[0].dtype, torch.float32)
    parts = torch.stack([lse.to(compute) for lse in lses])
    empty = parts.isneginf()
    nobody = empty.all(0)
    # where nobody saw a key there is nothing to differentiate: zeros in place of the logarithms
    safe = parts.masked_fill(nobody, 0.0)
    lse = torch.logsumexp(safe, 0).masked_fill(nobody, float("-inf"))
    weights = torch.softmax(safe, 0).masked_fill(nobody, 0.0)
    out = torch.zeros((), dtype=compute, device=outs[0].device)
    for part, weight in zip(outs, weights, strict=True):
        if part.dim() == 3:
            weight = weight.transpose(0, 1)
        out = out + part.to(compute) * weight.unsqueeze(-1)
    return out.to(outs[0].dtype), lse


def _check(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}; allowed: as many of both, at least one")
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_floating(f"outs[{index}]", out)
        check_floating(f"lses[{index}]", lse)
        first = outs[0]
        if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
            raise ValueError(
                f"outs[{index}] is {out.dtype} {tuple(out.shape)} on {out.device}; outs[0] is {first.dtype} "
                f"{tuple(first.shape)} on {first.device}, they must be equal"
            )
        if out.dim() not in (3, 4):
            raise ValueError(
                f"outs[{index}] has shape {tuple(out.shape)}; allowed: (batch, heads, seq, value_dim) or packed "
                "(total, heads, value_dim)"
            )
        shape = out.shape[:3] if out.dim() == 4 else (out.shape[1], out.shape[0])
        if tuple(lse.shape) != tuple(shape):
            raise ValueError(f"lses[{index}] has shape {tuple(lse.shape)}; outs[{index}] takes {tuple(shape)}")
        if lse.device != out.device:
            raise ValueError(f"lses[{index}] is on {lse.device}; outs[{index}] is on {out.device}, they must be equal")

"""How far attention over quantised pages may be from attention over the values that went into them.

Against the dequantised values the usual rules of parity hold: a kernel adds no error of its own. Against the exact
values the error is that of the format, and it has a bound.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantization_bound(
    q: Tensor,
    k_step: Tensor | float,
    v_step: Tensor | float,
    v_largest: Tensor | float,
    scale: float,
    roundings: int = 1,
) -> Tensor:
    """Bound on the error of attention when keys and values are rounded to steps.

    A key is off by e = roundings * k_step / 2 in each channel, so a score by at most d = scale * |q|_1 * e (softcap,
    ALiBi and masks add nothing). The weights then change by a factor between exp(-2 d) and exp(2 d), which moves the
    output by (exp(2 d) - 1) * v_largest at most, and the values themselves are off by roundings * v_step / 2.

    Args:
        q: (..., head_dim).
        k_step, v_step: the largest scale among the pages that a query reads, broadcast to ``q.shape[:-1]``.
        v_largest: the largest absolute value, likewise.
        scale: what scores are multiplied with.
        roundings: how often a value was rounded at most: once, and once for each growth of its page's scale.

    Returns:
        float64 (...): the bound for every channel of the output of that query.
    """
    distance = scale * q.double().abs().sum(dim=-1) * roundings * k_step / 2
    return torch.expm1(2 * distance) * v_largest + roundings * v_step / 2


def code_products_bound(q: Tensor, k_largest: float, v_largest: float, scale: float) -> Tensor:
    """Bound on what products of bytes add to that: int8 pages read with AVX-512 VNNI, against the dequantised values.

    A query is cut to 15 bits, so each channel is off by max|q| / 32512 at most, and the weights of a chunk of 64 keys
    to 16 bits of the largest of them, which moves the output by 64 / 65535 of the largest value at most.

    Args:
        q: (..., head_dim).
        k_largest, v_largest: the largest absolute values of the dequantised keys and values.
        scale: what scores are multiplied with.

    Returns:
        float64 (...): the bound for every channel of the output of that query.
    """
    distance = scale * q.double().abs().amax(dim=-1) / 32512 * q.shape[-1] * k_largest
    return (torch.expm1(2 * distance) + 64 / 65535) * v_largest

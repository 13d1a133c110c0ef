"""Reference rotary embedding (Su et al., 2021): pairs of channels rotated by the token's angle."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from atb_modules.kernels.costs import Cost
from atb_modules.kernels.registry import Kernel, register
from atb_modules.kernels.traits import RotaryTraits
from atb_modules.strategies import RotaryStrategy


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` channels of x (..., tokens, heads, head_dim); the rest pass through.

    cos and sin are (..., tokens, rotary_dim / 2). HALF pairs channel i with i + rotary_dim / 2, INTERLEAVED pairs
    2i with 2i + 1.
    """
    rotary_dim = 2 * cos.shape[-1]
    compute = torch.promote_types(x.dtype, torch.float32)
    pairing = "... (d two) -> two ... d" if interleaved else "... (two d) -> two ... d"
    a, b = rearrange(x[..., :rotary_dim].to(compute), pairing, two=2)
    cos, sin = (rearrange(t.to(compute), "... t d -> ... t 1 d") for t in (cos, sin))
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin])
    unpairing = "two ... d -> ... (d two)" if interleaved else "two ... d -> ... (two d)"
    return torch.cat([rearrange(rotated, unpairing).to(x.dtype), x[..., rotary_dim:]], dim=-1)


def _no_reasons(spec: object, traits: object) -> tuple[str, ...]:
    return ()


def _cost(spec: None, traits: RotaryTraits) -> Cost:
    return Cost(bytes=60.0 * traits.tokens * traits.num_heads * traits.head_dim, calls=12)


register(Kernel("rotary", RotaryStrategy.REFERENCE, rotary_reference, _no_reasons, _cost))

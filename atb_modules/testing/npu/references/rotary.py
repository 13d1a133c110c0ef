"""Rotary embeddings: one tensor, a pair in place, and a table with positions (text or M-RoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import current_soc, require
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import (
    HALVES,
    is_310p,
    is_950,
    require_contiguous,
    require_dtype,
    require_same_dtype,
)


def turn(x: Tensor, mode: str) -> Tensor:
    """A quarter turn of each plane: (-x2, x1) of the two halves, or of neighbours."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


def _turn_back(x: Tensor, mode: str) -> Tensor:
    """The transpose of ``turn``, a quarter turn the other way."""
    return -turn(x, mode)


def _check_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    require_dtype("input", x)
    require(x.dim() == r1.dim() == r2.dim() == 4, "input, r1 and r2 must have 4 dims")
    require(mode in ("half", "interleave"), f"rotary_mode is {mode!r}; supported: 'half', 'interleave'")
    require(r1.shape == r2.shape, f"r1 has shape {tuple(r1.shape)}, r2 {tuple(r2.shape)}; they must agree")
    head_dim = x.shape[-1]
    require(head_dim < 896 and head_dim % 2 == 0, f"D is {head_dim}; it must be even and below 896")
    require(mode == "half" or not is_310p(), "310P supports 'half' only")
    require(head_dim == 128 or not is_310p(), f"D is {head_dim}; 310P supports 128 only")
    require(r1.shape[-1] == head_dim, f"r1 has {r1.shape[-1]} channels, input {head_dim}")
    for mine, theirs in zip(r1.shape, x.shape, strict=True):
        require(mine in (1, theirs), f"r1 {tuple(r1.shape)} does not broadcast to input {tuple(x.shape)}")
    require(1 in r1.shape[:3] or r1.shape == x.shape, "r1 must be 11SD, B1SD, BNSD or the like for the layout of input")
    if mode == "half":
        require(x.shape[0] < 1000, f"the first axis has {x.shape[0]} elements; B, N < 1000")
    else:
        broadcast = [i for i in range(3) if r1.shape[i] == 1]
        require(len(broadcast) >= 2, "interleave takes r1 of 11SD, 1S1D or S11D only")
        rows = 1
        for i in broadcast:
            rows *= x.shape[i]
        require(rows < 1000, f"B * N is {rows}; it must be below 1000 for interleave")


@reference("npu::npu_rotary_mul")
def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Docs: half: "x1, x2 = chunk(input, 2, -1); x_new = cat((-x2, x1)); output = r1 * input + r2 * x_new"; interleave:
    the same with "x1 = input[..., ::2], x2 = input[..., 1::2]". "BNSD, BSND, SBND; D < 896 and a multiple of 2; B, N <
    1000"; "interleave: B * N < 1000, r1 of 11SD, 1S1D or S11D". With operators compiled online, as on 310P: "half
    only; D is 128".
    """
    _check_rotary_mul(input, r1, r2, rotary_mode)
    wide = input.float()
    return (wide * r1.float() + turn(wide, rotary_mode) * r2.float()).to(input.dtype)


@reference("npu::npu_rotary_mul_backward")
def rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivative of the forward's formula for input, r1 and r2."""
    _check_rotary_mul(input, r1, r2, rotary_mode)
    dy, wide = grad.float(), input.float()
    dx = dy * r1.float() + _turn_back(dy * r2.float(), rotary_mode)
    axes = [i for i in range(4) if r1.shape[i] == 1 and input.shape[i] != 1]
    products = (dy * wide, dy * turn(wide, rotary_mode))
    dr1, dr2 = (p.sum(axes, keepdim=True) if axes else p for p in products)
    return dx.to(input.dtype), dr1.to(r1.dtype), dr2.to(r2.dtype)


@reference("npu::npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Docs: "query and key in one pass, the result updates them in place"; on 310P, A2 and A3 "the last axis must be
    128 or 64", "BSND of 4 dims, TND of 3", "half", "the first two axes (TND: the first) of query, key, cos and sin
    must be equal, axis N of cos 1", "data types must be the same", "310P does not support bfloat16", "no empty
    tensors"; on 950 "D up to 1024", also SBND, BNSD and "interleave".
    """
    require_dtype("query", query)
    require_same_dtype(query=query, key=key, cos=cos, sin=sin)
    axes = {"BSND": (4, 2), "SBND": (4, 2), "BNSD": (4, 1), "TND": (3, 1)}
    layouts = tuple(axes) if is_950() else ("BSND", "TND")
    require(layout in layouts, f"layout is {layout!r}; supported: {', '.join(layouts)}")
    modes = ("half", "interleave") if is_950() else ("half",)
    require(rotary_mode in modes, f"rotary_mode is {rotary_mode!r}; supported: {', '.join(modes)}")
    dims, heads = axes[layout]
    require(query.dim() == key.dim() == cos.dim() == sin.dim() == dims, f"{layout} takes tensors of {dims} dims")
    head_dim = query.shape[-1]
    require(key.shape[-1] == head_dim, f"query has D {head_dim}, key {key.shape[-1]}; they must be equal")
    if is_950():
        require(head_dim <= 1024 and head_dim % 2 == 0, f"D is {head_dim}; it must be even and at most 1024")
    else:
        require(head_dim in (64, 128), f"D is {head_dim}; it must be 64 or 128")
        require(query.numel() > 0 and key.numel() > 0, "empty tensors are not supported")
    require(cos.shape == sin.shape and cos.shape[heads] == 1, "cos and sin must have one shape, with axis N 1")
    others = [i for i in range(dims - 1) if i != heads]
    for name, tensor in (("key", key), ("cos", cos)):
        same = all(tensor.shape[i] == query.shape[i] or (is_950() and tensor.shape[i] == 1) for i in others)
        require(same, f"{name} {tuple(tensor.shape)} and query {tuple(query.shape)} must agree but for the heads")
    require(cos.shape[-1] == head_dim, f"cos has D {cos.shape[-1]}, query {head_dim}")
    require_contiguous(query=query, key=key)
    for tensor in (query, key):
        wide = tensor.float()
        tensor.copy_(wide * cos.float() + turn(wide, rotary_mode) * sin.float())
    return query, key


@reference("npu::npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Docs: "positions (numTokens) is rope mode, (3, numTokens) mrope mode"; "query (numTokens, heads * headSize)";
    "cosSinCache (maxSeqLen, rotaryDim)": the cosines of the rotaryDim / 2 planes, then the sines; "rotaryDim is a
    multiple of 32 for BFLOAT16 and FLOAT16, of 16 for FLOAT32"; "positions beyond maxSeqLen are an out-of-range
    error"; "the three sections sum to rotaryDim / 2"; "cache_mode: 'default' joins three pieces, 'interleave'
    interleaves them".
    """
    require_dtype("query", query)
    require_same_dtype(query=query, key=key, cos_sin_cache=cos_sin_cache)
    require(query.dim() == key.dim() == cos_sin_cache.dim() == 2, "query, key and cosSinCache must have 2 dims")
    require(positions.dtype in (torch.int32, torch.int64), f"positions is {positions.dtype}; int32 or int64")
    rotary_dim = cos_sin_cache.shape[1]
    step = 32 if query.dtype in HALVES else 16
    require(rotary_dim % step == 0, f"rotaryDim is {rotary_dim}; it must be a multiple of {step} for {query.dtype}")
    require(rotary_dim <= head_size, f"rotaryDim is {rotary_dim}, headSize {head_size}")
    require(rotary_mode in ("half", "interleave"), f"rotary_mode is {rotary_mode!r}")
    require(cache_mode in ("default", "interleave"), f"cache_mode is {cache_mode!r}")
    require(not is_310p(), f"{current_soc().name} is not supported")
    inside = positions.numel() == 0 or bool((positions >= 0).all() and (positions < cos_sin_cache.shape[0]).all())
    require(inside, f"a position lies beyond the {cos_sin_cache.shape[0]} rows of cosSinCache")
    cos, sin = _pick(positions, cos_sin_cache.float(), mrope_section or [0, 0, 0], str(cache_mode))
    turned = [_rotate_flat(x, cos, sin, head_size, str(rotary_mode)) for x in (query, key)]
    return turned[0], turned[1]


def _pick(positions: Tensor, cache: Tensor, section: list[int], cache_mode: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, rotary_dim / 2)."""
    rows = cache[positions.long()]
    if not any(section):
        require(positions.dim() == 1, "positions has 2 dims, which needs mrope_section")
        cos, sin = rows.chunk(2, -1)
        return cos, sin
    planes = cache.shape[1] // 2
    require(positions.dim() == 2 and positions.shape[0] == 3, f"positions must be (3, n), got {tuple(positions.shape)}")
    require(len(section) == 3 and sum(section) == planes, f"mrope_section is {section}; it must sum to {planes}")
    plane = torch.arange(planes)
    if cache_mode == "default":
        source = torch.bucketize(plane, torch.tensor(section).cumsum(0), right=True)
    else:
        source = torch.where((plane % 3 == 1) & (plane < 3 * section[1]), 1, 0)
        source = torch.where((plane % 3 == 2) & (plane < 3 * section[2]), 2, source)
    cos, sin = rows.chunk(2, -1)
    return cos[source, :, plane].t(), sin[source, :, plane].t()


def _rotate_flat(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, mode: str) -> Tensor:
    require(x.shape[1] % head_size == 0, f"{x.shape[1]} channels are no multiple of headSize {head_size}")
    heads = x.float().unflatten(1, (-1, head_size))
    rotary_dim = 2 * cos.shape[-1]
    part, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
    spread = (lambda t: torch.cat((t, t), -1)) if mode == "half" else (lambda t: t.repeat_interleave(2, -1))
    turned = part * spread(cos)[:, None] + turn(part, mode) * spread(sin)[:, None]
    return torch.cat((turned, rest), -1).flatten(1).to(x.dtype)

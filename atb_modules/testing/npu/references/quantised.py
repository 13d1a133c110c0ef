"""Quantised and weight-only products, dynamic quantisation, and the scale that the cube core reads."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.errors import NoReferenceError
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import (
    HALVES,
    is_310p,
    require_dtype,
    require_not_310p,
    require_same_dtype,
)

_CODES = {1: torch.int8, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 3: torch.int32, -1: torch.int8}
_INNER = 65535


def as_dtype(code: int | None, default: torch.dtype) -> torch.dtype:
    """A dtype that an operator takes as a number: torch's scalar type."""
    if code is None:
        return default
    require(code in _CODES, f"dtype number {code} is not emulated")
    return _CODES[code]


@reference("npu::npu_trans_quant_param")
def trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """Docs: "converts the scale's data type for the quantised product", to int64. aclnnTransQuantParam: the bits of the
    float32 scale, its last 13 bits cut ("0: truncated"), stand in the low 32 bits; an offset, as 9 bits, in bits 37
    to 45.
    """
    require(scale.dtype == torch.float32, f"scale is {scale.dtype}; float32")
    require(scale.dim() == 1 or (scale.dim() == 2 and scale.shape[0] == 1), "scale is (t,) or (1, n)")
    require(round_mode == 0, "round_mode 1 is not emulated")
    bits = scale.contiguous().view(torch.int32).long() & 0xFFFFE000
    if offset is not None:
        require(offset.dtype == torch.float32, f"offset is {offset.dtype}; float32")
        code = offset.round().clamp(-256, 255).long() & 0x1FF
        bits = bits | (code << 37) | (1 << 46)
    return bits


@reference("npu::npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
) -> Tensor:
    """Docs: "x1, x2: int8"; "scale: float32, int64 or bfloat16, (1,) or (n,)"; "offset: float32", of the *output*,
    for int8 out only: there is no zero point of the weight; "pertoken_scale: float32 (m,)", not on 310P; "bias:
    int32, bfloat16, float16 or float32"; "output None means int8"; the table of allowed pairs; "the last axes at most
    65535".
    """
    out_dtype = as_dtype(output_dtype, torch.int8)
    require(x1.dtype == x2.dtype == torch.int8, f"x1 is {x1.dtype}, x2 {x2.dtype}; int8 (int4 is not emulated)")
    require(2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6, "x1 and x2 have 2 to 6 dims")
    require(x1.shape[-1] == x2.shape[-2], f"x1 has k {x1.shape[-1]}, x2 {x2.shape[-2]}")
    require(max(x1.shape[-1], x2.shape[-1]) <= _INNER, "the last axes must not exceed 65535")
    columns, rows = x2.shape[-1], x1.shape[-2]
    _check_scales(scale, offset, pertoken_scale, bias, out_dtype, rows, columns)
    product = (x1.double() @ x2.double()).float() if x1.shape[-1] > 1024 else x1.float() @ x2.float()
    if bias is not None and bias.dtype == torch.int32:
        product = product + bias.float()
    if out_dtype == torch.int32:
        return product.to(torch.int32)
    product = product * read_scale(scale)
    if pertoken_scale is not None:
        product = product * pertoken_scale[:, None]
    if bias is not None and bias.dtype != torch.int32:
        product = product + bias.float()
    if out_dtype == torch.int8:
        product = (product if offset is None else product + offset).round().clamp(-128, 127)
    return product.to(out_dtype)


def read_scale(scale: Tensor) -> Tensor:
    """The float32 scale; out of the low 32 bits where ``npu_trans_quant_param`` made int64 of it."""
    if scale.dtype != torch.int64:
        return scale.float()
    low = scale & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32).view(torch.float32)


def _check_scales(
    scale: Tensor,
    offset: Tensor | None,
    pertoken: Tensor | None,
    bias: Tensor | None,
    out: torch.dtype,
    rows: int,
    columns: int,
) -> None:
    """The table of data types that go together."""
    fits = scale.dim() == 1 and scale.shape[0] in (1, columns)
    require(fits, f"scale has shape {tuple(scale.shape)}; (1,) or ({columns},)")
    scales: dict[torch.dtype, tuple[torch.dtype, ...]] = {
        torch.int8: (torch.int64, torch.float32),
        torch.float16: (torch.float32,) if pertoken is not None else (torch.int64, torch.float32),
        torch.bfloat16: (torch.float32, torch.bfloat16),
        torch.int32: (torch.float32, torch.bfloat16),
    }
    outs = (torch.int8, torch.float16) if is_310p() else tuple(scales)
    require(out in outs, f"the output is {out}; supported: {', '.join(map(str, outs))}")
    allowed = tuple(d for d in scales[out] if not (is_310p() and d == torch.bfloat16))
    require(scale.dtype in allowed, f"scale is {scale.dtype}; with output {out}: {', '.join(map(str, allowed))}")
    if offset is not None:
        require(out == torch.int8, f"offset shifts int8 outputs only, the output is {out}")
        good = offset.dtype == torch.float32 and offset.dim() == 1 and offset.shape[0] in (1, columns)
        require(good, f"offset is {offset.dtype} {tuple(offset.shape)}; float32 (1,) or ({columns},)")
    if pertoken is not None:
        require(not is_310p(), "310P does not support pertoken_scale")
        require(out in HALVES, f"pertoken_scale goes with float16 and bfloat16 outputs, the output is {out}")
        good = pertoken.dtype == torch.float32 and tuple(pertoken.shape) == (rows,)
        require(good, f"pertoken_scale is {pertoken.dtype} {tuple(pertoken.shape)}; float32 ({rows},)")
    if bias is not None:
        floats = {torch.bfloat16: (torch.bfloat16, torch.float32), torch.float16: (torch.float16, torch.float32)}
        more = floats.get(out, ()) if out == torch.bfloat16 or pertoken is not None else ()
        kinds = (torch.int32, *more)
        require(bias.dtype in kinds, f"bias is {bias.dtype}; here {', '.join(map(str, kinds))}")
        require(bias.shape[-1] == columns, f"bias has {bias.shape[-1]} elements, the product {columns} columns")


@reference("npu::npu_dynamic_quant")
def dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None = None, dst_type: int | None = None, quant_mode: str = "pertoken"
) -> tuple[Tensor, Tensor]:
    """Docs: "scale = rowMax(abs(x * smooth_scales)) / 127; y = round(x * smooth_scales / scale)"; "x: float16 or
    bfloat16, more than one dim"; "smooth_scales: x's data type, as long as the last axis". A row of zeros gives scale
    0 and codes 0.
    """
    require_not_310p()
    require_dtype("x", input, HALVES)
    require(input.dim() > 1, f"x has {input.dim()} dim; more than one is supported")
    require(quant_mode == "pertoken", f"quant_mode {quant_mode!r} is not emulated")
    if as_dtype(dst_type, torch.int8) != torch.int8:
        raise NoReferenceError("npu_dynamic_quant: only int8 is emulated")
    wide = input.float()
    if smooth_scales is not None:
        require_same_dtype(x=input, smooth_scales=smooth_scales)
        require(tuple(smooth_scales.shape) == (input.shape[-1],), "smooth_scales must be (the last axis of x,)")
        wide = wide * smooth_scales.float()
    scale = wide.abs().amax(-1) / 127.0
    codes = (wide / scale[..., None]).nan_to_num(0.0).round().clamp(-128, 127)
    return codes.to(torch.int8), scale


@reference("npu::npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
) -> Tensor:
    """aclnnWeightQuantBatchMatmul: "y = x @ ((weight + antiquant_offset) * antiquant_scale) + bias". Docs: "x (M, K)
    float16 or bfloat16; weight (K, N) int8"; "per tensor (1,), per channel (1, N) or (N,), per group (ceil(K /
    group), N)"; "group sizes from 32 to K - 1, multiples of 32", not on 310P; "the scale's data type is x's; scale
    and offset agree in shape"; "bias float16 for float16, float32 for bfloat16"; "K and N at most 65535"; "no empty
    tensors".
    """
    require_dtype("x", x, (torch.float16,) if is_310p() else HALVES)
    require(x.dim() == weight.dim() == 2, "x and weight have 2 dims, (M, K) and (K, N)")
    if weight.dtype == torch.int32:
        raise NoReferenceError("npu_weight_quant_batchmatmul: packed int4 weights are not emulated")
    require(weight.dtype == torch.int8, f"weight is {weight.dtype}; int8 (or int4 in int32)")
    depth, columns = weight.shape
    require(x.shape[1] == depth, f"x has K {x.shape[1]}, weight {depth}")
    require(x.numel() > 0 and weight.numel() > 0, "empty tensors are not supported")
    require(max(depth, columns) <= _INNER, f"K is {depth}, N {columns}; at most 65535")
    require_same_dtype(x=x, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
    group = antiquant_group_size
    if group:
        require(not is_310p(), "310P does not support groups")
        good = 32 <= group <= depth - 1 and group % 32 == 0
        require(good, f"antiquant_group_size is {group}; a multiple of 32 from 32 to K - 1 = {depth - 1}")
        shapes: list[tuple[int, ...]] = [(-(-depth // group), columns)]
    else:
        shapes = [(1,), (1, 1), (columns,), (1, columns)]
    require(tuple(antiquant_scale.shape) in shapes, f"antiquant_scale is {tuple(antiquant_scale.shape)}; {shapes}")
    if antiquant_offset is not None:
        require(antiquant_offset.shape == antiquant_scale.shape, "antiquant_offset and antiquant_scale differ in shape")
    wide = weight.float()
    spread = (lambda t: t.float().repeat_interleave(group, 0)[:depth]) if group else (lambda t: t.float())
    if antiquant_offset is not None:
        wide = wide + spread(antiquant_offset)
    product = x.float() @ (wide * spread(antiquant_scale))
    if bias is not None:
        wanted = torch.float32 if x.dtype == torch.bfloat16 else torch.float16
        require(bias.dtype == wanted, f"bias is {bias.dtype}; {wanted} with x {x.dtype}")
        product = product + bias.float()
    return product.to(x.dtype)

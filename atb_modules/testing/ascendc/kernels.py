"""Our Ascend C kernels on the emulation, called like functions: tensors in, tensors and a report out.

Each computes its tiling with the C++ that the torch binding uses, then launches the kernel of the dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atb_modules.kernels import ascend
from atb_modules.kernels.ascend.socs import Soc, find_soc
from atb_modules.testing.ascendc.build import build_host
from atb_modules.testing.ascendc.run import Argument, In, InOut, Out, Report, launch

#: where the sources of the kernels lie
ASCENDC = Path(ascend.__file__).parent / "ascendc"
DTYPES = {torch.float16: (0, "half"), torch.bfloat16: (1, "bfloat16"), torch.float32: (2, "float")}
#: bytes of the unified buffer that the tilings leave to the runtime (kAtbReservedUb)
RESERVED_UB = 256
GATES = ("silu", "gelu_tanh", "quick_gelu")
_FLOAT = {"eps", "scale", "softcap", "weight_offset"}


class Cube(ctypes.Structure):
    """What the tilings of kernels with a cube side are told of it."""

    _fields_ = [(name, ctypes.c_int64) for name in ("l1", "l0a", "l0b", "l0c")] + [("arch", ctypes.c_int32)]


class RotaryAppendShape(ctypes.Structure):
    """What the tiling of rotary and append is told of a call."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "tokens", "heads", "kv_heads", "head_dim", "value_dim", "pairs", "q_step", "k_step", "v_step", "page_size",
            "pages",
        )
    ] + [(name, ctypes.c_int32) for name in ("interleaved", "slots_int64")]  # fmt: skip


class _Soc(ctypes.Structure):
    _fields_ = [("ub", ctypes.c_int64)] + [
        (name, ctypes.c_int32) for name in ("vector_cores", "cube_cores", "bfloat16", "pads")
    ]


@cache
def _host() -> ctypes.CDLL:
    return ctypes.CDLL(str(build_host(ASCENDC / "tiling" / "abi.cpp")))


def soc_of(soc: str | Soc) -> Soc:
    return soc if isinstance(soc, Soc) else find_soc(soc)


def tile(op: str, struct: str, soc: str | Soc, **given: Any) -> ctypes.Array:
    """The tiling of an op as bytes; its first word is the number of blocks.

    Raises:
        ValueError: the kernel does not take such a call on this SoC; the text says why.
    """
    soc = soc_of(soc)
    numbers = _Soc(soc.ub - RESERVED_UB, soc.vector_cores, soc.cube_cores, soc.bfloat16, soc.arch != "dav-2002")
    host = _host()
    out = (ctypes.c_uint8 * getattr(host, f"atb_sizeof_{struct}")())()
    function = getattr(host, f"atb_tile_{op}")
    function.restype = ctypes.c_char_p
    values = [_value(name, value) for name, value in given.items()]
    reason = function(ctypes.byref(numbers), *values, out)
    if reason is not None:
        raise ValueError(f"ascend {op} on {soc.name}: {reason.decode()}")
    return out


def _value(name: str, value: Any) -> Any:
    if isinstance(value, ctypes.Structure):
        return ctypes.byref(value)
    if name in _FLOAT:
        return ctypes.c_float(value)
    if isinstance(value, torch.dtype):
        if value not in DTYPES:
            raise TypeError(f"{name} is {value}; allowed: {', '.join(map(str, DTYPES))}")
        return ctypes.c_int32(DTYPES[value][0])
    if isinstance(value, bool):
        return ctypes.c_int32(value)
    return ctypes.c_int64(value)


def host_number(function: str, tiling: ctypes.Array, *given: int) -> int:
    """What a host function says of a tiling, such as the bytes of its workspace."""
    call = getattr(_host(), function)
    call.restype = ctypes.c_int64
    return int(call(tiling, *given))


def cube_of(soc: str | Soc) -> Cube:
    soc = soc_of(soc)
    return Cube(soc.l1, soc.l0a, soc.l0b, soc.l0c, soc.npu_arch)


def blocks_of(tiling: ctypes.Array) -> int:
    return int.from_bytes(bytes(tiling)[:4], "little")


def run(
    kernel: str,
    dtype: torch.dtype,
    arguments: Sequence[Argument | None],
    tiling: ctypes.Array,
    soc: str | Soc,
    trace: bool,
) -> Report:
    """The kernel ``atb_<kernel>_<dtype>`` of ``<kernel>.cpp`` with a tiling."""
    source, name = ASCENDC / f"{kernel}.cpp", f"atb_{kernel}_{DTYPES[dtype][1]}"
    return launch(source, name, [*arguments, tiling], soc=soc, blocks=blocks_of(tiling), trace=trace)


def _optional(tensor: Tensor | None) -> Argument | None:
    return None if tensor is None else In(tensor)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_first: bool = False,
    keep_rstd: bool = True,
    soc: str | Soc = "ascend910b1",
    trace: bool = True,
) -> tuple[Tensor, Tensor | None, Report]:
    """RMSNorm of x (rows, width); returns (y, rstd (rows,) in float32 or None, report)."""
    rows, width = x.shape
    tiling = tile(
        "rms_norm", "RmsNormTiling", soc, dtype=x.dtype, rows=rows, width=width, adds=False,
        has_weight=weight is not None, cast_first=cast_first, keeps_rstd=keep_rstd, eps=eps,
        weight_offset=weight_offset,
    )  # fmt: skip
    y = torch.empty_like(x)
    rstd = torch.empty(rows) if keep_rstd else None
    arguments = [In(x), _optional(weight), Out(y), None if rstd is None else Out(rstd)]
    return y, rstd, run("rms_norm", x.dtype, arguments, tiling, soc, trace)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_first: bool = False,
    keep_rstd: bool = True,
    soc: str | Soc = "ascend910b1",
    trace: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Report]:
    """RMSNorm of x + residual (rows, width); returns (y, sum, rstd (rows,) in float32 or None, report)."""
    rows, width = x.shape
    tiling = tile(
        "rms_norm", "RmsNormTiling", soc, dtype=x.dtype, rows=rows, width=width, adds=True,
        has_weight=weight is not None, cast_first=cast_first, keeps_rstd=keep_rstd, eps=eps,
        weight_offset=weight_offset,
    )  # fmt: skip
    y, total = torch.empty_like(x), torch.empty_like(x)
    rstd = torch.empty(rows) if keep_rstd else None
    arguments = [In(x), In(residual), _optional(weight), Out(y), Out(total), None if rstd is None else Out(rstd)]
    return y, total, rstd, run("add_rms_norm", x.dtype, arguments, tiling, soc, trace)


def rms_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_sum: Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    soc: str | Soc = "ascend910b1",
    trace: bool = True,
) -> tuple[Tensor, Tensor | None, Report]:
    """Backward of both norms: x is the sum where there was one, ``grad_sum`` what comes back for it.

    Returns:
        (grad_x (rows, width), grad_weight (width,) in float32 or None, report).
    """
    rows, width = x.shape
    tiling = tile(
        "rms_norm_backward", "RmsNormBackwardTiling", soc, dtype=x.dtype, rows=rows, width=width,
        has_weight=weight is not None, has_sum_grad=grad_sum is not None, weight_offset=weight_offset,
    )  # fmt: skip
    grad_x = torch.empty_like(x)
    partial = None if weight is None else torch.empty(blocks_of(tiling), width)
    arguments = [
        In(grad_y), In(x), In(rstd), _optional(weight), _optional(grad_sum), Out(grad_x),
        None if partial is None else Out(partial),
    ]  # fmt: skip
    report = run("rms_norm_backward", x.dtype, arguments, tiling, soc, trace)
    return grad_x, None if partial is None else partial.sum(0), report


def gated_activation(
    gate: Tensor, up: Tensor, kind: str = "silu", *, soc: str | Soc = "ascend910b1", trace: bool = True
) -> tuple[Tensor, Report]:
    """``activation(gate) * up`` over (rows, width); rows may be views into longer ones. Returns (out, report)."""
    if kind not in GATES:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(GATES)}")
    rows, width = gate.shape
    tiling = tile(
        "gated", "GatedTiling", soc, dtype=gate.dtype, rows=rows, width=width, gate_step=gate.stride(0),
        up_step=up.stride(0), kind=GATES.index(kind),
    )  # fmt: skip
    out = torch.empty(rows, width, dtype=gate.dtype)
    return out, run("gated", gate.dtype, [In(gate), In(up), Out(out)], tiling, soc, trace)


def rotary_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
    soc: str | Soc = "ascend910b1",
    trace: bool = True,
) -> Report:
    """Rotate q (tokens, heads, dim) in place, append rotated k and v to pages (pages, kv_heads, page_size, dim).

    Tokens of q, k and v may be apart (views of one product), their heads dense; slots are int32 or int64.
    """
    tokens, heads, dim = q.shape
    pages, kv_heads, page_size, _ = k_pages.shape
    shape = RotaryAppendShape(
        tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=v.shape[-1], pairs=cos.shape[-1],
        q_step=q.stride(0), k_step=k.stride(0), v_step=v.stride(0), page_size=page_size, pages=pages,
        interleaved=interleaved, slots_int64=slots.dtype == torch.int64,
    )  # fmt: skip
    tiling = tile("rotary_append", "RotaryAppendTiling", soc, dtype=q.dtype, shape=shape)
    arguments = [InOut(q), In(k), In(v), In(cos), In(sin), InOut(k_pages), InOut(v_pages), In(slots)]
    return run("rotary_append", q.dtype, arguments, tiling, soc, trace)


def lse_merge(
    outs: Tensor, lses: Tensor, *, soc: str | Soc = "ascend910b1", trace: bool = True
) -> tuple[Tensor, Tensor, Report]:
    """Merge outs (parts, rows, width) by lses (parts, rows) in float32; returns (out, lse, report)."""
    parts, rows, width = outs.shape
    tiling = tile("lse_merge", "LseMergeTiling", soc, dtype=outs.dtype, parts=parts, rows=rows, width=width)
    out, lse = torch.empty(rows, width, dtype=outs.dtype), torch.empty(rows)
    report = run("lse_merge", outs.dtype, [In(outs), In(lses), Out(out), Out(lse)], tiling, soc, trace)
    return out, lse, report

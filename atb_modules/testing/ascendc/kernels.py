"""Our Ascend C kernels on the emulation, called like functions: tensors in, tensors and a report out.

Each computes its tiling with the C++ that the torch binding uses, then launches the kernel of the dtype.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atb_modules.kernels import ascend
from atb_modules.kernels.ascend.socs import Soc, find_soc
from atb_modules.testing.ascendc.build import build_host
from atb_modules.testing.ascendc.run import Argument, In, Out, Report, launch

#: where the sources of the kernels lie
ASCENDC = Path(ascend.__file__).parent / "ascendc"
DTYPES = {torch.float16: (0, "half"), torch.bfloat16: (1, "bfloat16"), torch.float32: (2, "float")}
_FLOAT = {"eps", "weight_offset"}


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
    numbers = _Soc(soc.ub, soc.vector_cores, soc.cube_cores, soc.bfloat16, soc.arch != "dav-2002")
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
    if name in _FLOAT:
        return ctypes.c_float(value)
    if isinstance(value, torch.dtype):
        if value not in DTYPES:
            raise TypeError(f"{name} is {value}; allowed: {', '.join(map(str, DTYPES))}")
        return ctypes.c_int32(DTYPES[value][0])
    if isinstance(value, bool):
        return ctypes.c_int32(value)
    return ctypes.c_int64(value)


def blocks_of(tiling: ctypes.Array) -> int:
    return int.from_bytes(bytes(tiling)[:4], "little")


def run(
    kernel: str, dtype: torch.dtype, arguments: list[Argument | None], tiling: ctypes.Array, soc: str | Soc, trace: bool
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

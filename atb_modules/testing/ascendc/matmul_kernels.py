"""Our Ascend C kernels with a matrix product on the emulation, called like functions: tensors in, tensors out."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.kernels.ascend.socs import Soc
from atb_modules.testing.ascendc.kernels import DTYPES, cube_of, host_number, run, tile
from atb_modules.testing.ascendc.run import In, Out, Report, Work


def norm_matmul(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_first: bool = False,
    soc: str | Soc = "ascend910b1",
    trace: bool = True,
) -> tuple[Tensor, Report]:
    """``rms_norm(x) @ weight.T`` of x (rows, width) and weight (columns, width); returns (out, report)."""
    rows, width = x.shape
    tiling = tile(
        "norm_matmul", "NormMatmulTiling", soc, cube=cube_of(soc), dtype=x.dtype, rows=rows, width=width,
        columns=weight.shape[0], has_weight=norm_weight is not None, cast_first=cast_first, eps=eps,
        weight_offset=weight_offset,
    )  # fmt: skip
    bytes_needed = host_number("atb_norm_matmul_workspace", tiling, DTYPES[x.dtype][0])
    out, work = torch.empty(rows, weight.shape[0], dtype=x.dtype), torch.empty(bytes_needed, dtype=torch.uint8)
    arguments = [
        In(x), None if norm_weight is None else In(norm_weight), In(weight), Out(out),
        Work(work.view(x.dtype)) if bytes_needed else None,
    ]  # fmt: skip
    return out, run("norm_matmul", x.dtype, arguments, tiling, soc, trace)

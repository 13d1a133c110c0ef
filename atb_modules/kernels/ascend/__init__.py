"""Kernels of Ascend NPUs: torch_npu's fused operators and our own Ascend C kernels. Imports without either."""

from atb_modules.kernels.ascend import (  # noqa: F401, I001  (registration, in this order)
    records_attention,
    records_rows,
    records_chains,
    records_quantized,
    records_ascendc,
)

"""Whether this CPU has matrix units for half precision; what is fast in bfloat16 depends on nothing else as much."""

from __future__ import annotations

import torch

#: Read once: the processor does not change, and torch.compile cannot trace the question.
BFLOAT16_UNITS = bool(
    (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    and torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
#: Tiles (AMX) and not only dot products of vectors (AVX-512 BF16): PyTorch's fused attention is no faster in bfloat16
#: than in float32 without them, where oneDNN's matrix products are.
BFLOAT16_TILES = BFLOAT16_UNITS and bool(torch.cpu._is_amx_tile_supported())


def cpu_has_half_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` by units of its own, and oneDNN may use them."""
    return dtype == torch.bfloat16 and BFLOAT16_UNITS


def cpu_has_half_tiles(dtype: torch.dtype) -> bool:
    """Whether those units multiply whole tiles."""
    return dtype == torch.bfloat16 and BFLOAT16_TILES

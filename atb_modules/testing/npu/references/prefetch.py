"""npu_prefetch: weights into the second-level cache before they are needed."""

from __future__ import annotations

from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import require_not_310p


@reference("npu::npu_prefetch")
def prefetch(input: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """Docs: "max_size must exceed 0; beyond the weight's size it is set to that"; "offset: at least 0, not beyond the
    weight's addresses"; "no processing of the data". It changes nothing but time.
    """
    require_not_310p()
    size = input.numel() * input.element_size()
    require(max_size > 0, f"max_size is {max_size}; above 0")
    require(0 <= offset < max(size, 1), f"offset is {offset}; 0 to below the {size} bytes of input")

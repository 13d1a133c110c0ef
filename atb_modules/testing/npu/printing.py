"""Prints emulated NPU tensors from their memory: torch prints with operators, which no device is there to run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atb_modules.testing.npu.aliases import alias, is_npu


def print_from_memory() -> None:
    """Make ``repr`` of tensors on ``npu:`` read their memory; all others print as before."""
    before = torch._tensor_str._str

    def printed(self: Tensor, *, tensor_contents: Any = None) -> str:
        if not is_npu(self):
            return before(self, tensor_contents=tensor_contents)
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            text = before(alias(self.detach()).clone(), tensor_contents=tensor_contents)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{text[:-1]}, device='{self.device}'{grad})"

    torch._tensor_str._str = printed

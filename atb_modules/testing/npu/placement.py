"""Which arguments of an operator lie on the host, and that all others lie on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from atb_modules.testing.npu.binding import require

#: Operation -> tensors that stay on the host. ATB sizes its tiles from the lengths before the launch, and torch_npu
#: copies none back from the device: the dry run shows no copy.
_ON_HOST = {
    "atb::_npu_paged_attention": ("context_lens",),
    "atb::_npu_paged_attention_mla": ("context_lens",),
}
#: Tensors that either side may hold.
_ANYWHERE = {
    "npu::npu_fusion_attention_v3": ("actual_seq_qlen", "actual_seq_kvlen"),
    "npu::npu_fusion_attention_grad_v3": ("actual_seq_qlen", "actual_seq_kvlen", "seed", "offset"),
}


def check_placement(name: str, bound: dict[str, Any]) -> None:
    """Raise OperatorError where a tensor lies on the wrong side, or where tensors lie on several devices."""
    if not name.startswith(("npu::", "atb::")):
        return
    devices: dict[torch.device, str] = {}
    for argument, value in bound.items():
        for tensor in tree_flatten(value)[0]:
            if not isinstance(tensor, Tensor) or argument in _ANYWHERE.get(name, ()):
                continue
            if argument in _ON_HOST.get(name, ()):
                require(tensor.device.type == "cpu", f"{argument} is on {tensor.device}; it must be on the host")
            else:
                require(tensor.device.type == "npu", f"{argument} is on {tensor.device}; it must be on the device")
                devices.setdefault(tensor.device, argument)
    if len(devices) > 1:
        places = ", ".join(f"{argument} on {device}" for device, argument in devices.items())
        require(False, f"tensors lie on several devices: {places}")

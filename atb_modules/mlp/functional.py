"""The functional activations of a feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.checks import check_bool, check_floating, is_floating
from atb_modules.kernels.activation import activation_torch, activation_torch_
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import ActivationTraits, count

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")
#: Those that stand alone: CLIP's x sigmoid(1.702 x) gates nothing in any model.
PLAIN_KINDS = (*KINDS, "quick_gelu", "relu")


def gated_activation(
    gate: Tensor, up: Tensor, kind: str = "silu", *, strategy: str = "auto", overwrite: bool = False
) -> Tensor:
    """``activation(gate) * up``, elementwise (GLU variants: Shazeer, 2020).

    Args:
        gate, up: equal shapes (..., width); may be the two halves of one fused product.
        kind: "silu" (SwiGLU), "gelu" (GeGLU), "gelu_tanh" or "relu2".
        overwrite: whether the result may take gate's memory, where no gradient is recorded.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
    if not (is_floating(gate) and is_floating(up)):
        check_floating("gate", gate)
        check_floating("up", up)
    if overwrite is not True and overwrite is not False:
        check_bool("overwrite", overwrite)
    shape, device = gate.shape, gate.device
    if shape != up.shape:
        raise ValueError(f"gate has shape {tuple(shape)}; up has {tuple(up.shape)}, they must be equal")
    if gate.dtype != up.dtype:
        raise TypeError(f"gate is {gate.dtype}; up is {up.dtype}, they must be equal")
    if not shape:
        raise ValueError("gate has no axis; allowed: (..., width)")
    if device != up.device:
        raise ValueError(f"gate is on {device}; up is on {up.device}, they must be equal")
    traits = ActivationTraits(
        device_type=device.type,
        dtype=gate.dtype,
        kind=kind,
        rows=count(shape[:-1]),
        width=shape[-1],
        requires_grad=torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad),
        contiguous=gate.is_contiguous() and up.is_contiguous(),
    )
    kernel = resolve("gated_activation", None, traits, strategy)
    if kernel.needs_contiguous:
        gate, up = gate.contiguous(), up.contiguous()
    return kernel.choose_function(overwrite, traits)(gate, up, kind)


def activation(x: Tensor, kind: str, *, overwrite: bool = False) -> Tensor:
    """The plain activation: "silu", "gelu", "gelu_tanh", "quick_gelu", "relu" or "relu2", by torch's own kernels.

    ``overwrite`` lets the result take x's memory, where no gradient is recorded.
    """
    if kind not in PLAIN_KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(PLAIN_KINDS)}")
    check_floating("x", x)
    if overwrite and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return activation_torch_(x, kind)
    return activation_torch(x, kind)

"""What the functions of ``ops`` ask of their arguments, under the names that their callers gave them."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor

from atb_modules.checks import check_bool, check_floating
from atb_modules.kernels.traits import under_autocast
from atb_modules.mlp.functional import KINDS


def check_product(a: Tensor, b: Tensor, trans_b: bool, bias: Tensor | None, names: tuple[str, str]) -> None:
    """Raises unless ``a @ b`` (``a @ b^T`` with trans_b) plus bias is defined; ``names`` are those of a and b."""
    first, second = names
    check_floating(first, a)
    check_floating(second, b)
    check_floating("bias", bias, optional=True)
    check_bool("trans_b", trans_b)
    if a.dim() < 1 or b.dim() < 2:
        raise ValueError(
            f"{first} has shape {tuple(a.shape)} and {second} {tuple(b.shape)}; allowed: at least 1 axis and 2"
        )
    inner, columns = (b.shape[-1], b.shape[-2]) if trans_b else (b.shape[-2], b.shape[-1])
    if a.shape[-1] != inner:
        raise ValueError(
            f"{first} has shape {tuple(a.shape)}, {a.shape[-1]} features; {second} of shape {tuple(b.shape)} takes "
            f"{inner}"
        )
    for name, tensor in ((second, b), ("bias", bias)):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device}; {first} is on {a.device}, they must be equal")
    shape: tuple[int, ...] = (*a.shape[:-1], columns)
    if b.dim() > 2:
        if a.dtype != b.dtype and not under_autocast(a.device.type):
            raise TypeError(f"{second} is {b.dtype}; {first} is {a.dtype}, with more than two axes they must be equal")
        lead = list(zip_longest(reversed(a.shape[:-2]), reversed(b.shape[:-2]), fillvalue=1))
        if any(x != y and 1 not in (x, y) for x, y in lead):
            raise ValueError(
                f"{first} has shape {tuple(a.shape)} and {second} {tuple(b.shape)}; their leading axes must broadcast"
            )
        shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[-2:-1], columns)
    elif bias is not None and tuple(bias.shape) != (columns,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; allowed: ({columns},), the columns of {second}")
    if bias is not None and (
        bias.dim() > len(shape)
        or any(have not in (1, want) for have, want in zip(reversed(bias.shape), reversed(shape), strict=False))
    ):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must broadcast to the product {shape}")


def check_norm(x: Tensor, **parameters: Tensor | None) -> None:
    """Raises unless each parameter is None or one number a channel of x."""
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        check_floating(name, parameter, optional=True)
        if tuple(parameter.shape) != (x.shape[-1],):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}; x of width {x.shape[-1]} allows ({x.shape[-1]},)"
            )
        if parameter.device != x.device:
            raise ValueError(f"{name} is on {parameter.device}; x is on {x.device}, they must be equal")


def check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raises unless both have one shape, dtype and device."""
    check_floating(name, tensor)
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; {other_name} has {tuple(other.shape)}, they must be equal"
        )
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} is {tensor.dtype}; {other_name} is {other.dtype}, they must be equal")
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}; {other_name} is on {other.device}, they must be equal")


def check_mlp(x: Tensor, gate_w: Tensor | None, up_w: Tensor, down_w: Tensor, kind: str) -> None:
    """Raises unless the weights (in, out) are those of a feed-forward of x (..., in)."""
    check_product(x, up_w, False, None, ("x", "up_w"))
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}")
    if gate_w is not None:
        check_product(x, gate_w, False, None, ("x", "gate_w"))
    for name, weight in (("gate_w", gate_w), ("up_w", up_w), ("down_w", down_w)):
        check_floating(name, weight, optional=name == "gate_w")
        if weight is not None and weight.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}; allowed: (in, out)")
    if gate_w is not None and gate_w.shape != up_w.shape:
        raise ValueError(f"gate_w has shape {tuple(gate_w.shape)}; up_w has {tuple(up_w.shape)}, must be equal")
    if down_w.shape[0] != up_w.shape[1]:
        raise ValueError(
            f"x @ up_w has {up_w.shape[1]} features; down_w of shape {tuple(down_w.shape)} takes {down_w.shape[0]}"
        )
    if down_w.device != x.device:
        raise ValueError(f"down_w is on {down_w.device}; x is on {x.device}, they must be equal")

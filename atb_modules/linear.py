"""Matrix products with a weight: the functional op and the module that every projection is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.checks import (
    check_bool,
    check_device,
    check_floating,
    check_int,
    check_parameter_dtype,
    check_tensor,
    is_floating,
)
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import LinearTraits, count, under_autocast
from atb_modules.norm_linear import norm_linear
from atb_modules.strategies import LinearStrategy, parse_enum


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, strategy: str = "auto") -> Tensor:
    """``x weight^T + bias``.

    Args:
        x: (..., in_features), floating.
        weight: (out_features, in_features); float32, bfloat16 and float16 weights all serve x of any of these dtypes.
        bias: (out_features,) or None.

    Returns:
        (..., out_features) in x's dtype (under autocast, in autocast's).
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if not is_floating(tensor):
            check_floating(name, tensor)
    shape, weight_shape, device = x.shape, weight.shape, x.device
    if len(weight_shape) != 2 or not shape:
        raise ValueError(
            f"x has shape {tuple(shape)} and weight {tuple(weight_shape)}; allowed: (..., in_features) and "
            "(out_features, in_features)"
        )
    out_features, in_features = weight_shape
    if bias is not None:
        if not is_floating(bias):
            check_floating("bias", bias, optional=True)
        if tuple(bias.shape) != (out_features,):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}; weight of shape {tuple(weight_shape)} takes ({out_features},)"
            )
        if bias.device != device:
            raise ValueError(f"bias is on {bias.device}; x is on {device}, they must be equal")
    if shape[-1] != in_features:
        raise ValueError(f"x has {shape[-1]} features; weight of shape {tuple(weight_shape)} takes {in_features}")
    if device != weight.device:
        raise ValueError(f"x is on {device}; weight is on {weight.device}, they must be equal")
    requires_grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    traits = LinearTraits(
        device_type=device.type,
        dtype=x.dtype,
        weight_dtype=weight.dtype,
        rows=count(shape[:-1]),
        in_features=in_features,
        out_features=out_features,
        has_bias=bias is not None,
        weight_contiguous=weight.is_contiguous(),
        requires_grad=requires_grad,
        autocast=under_autocast(device.type),
        contiguous=x.is_contiguous(),
    )
    kernel = resolve("linear", None, traits, strategy)
    return kernel.function(x.contiguous() if kernel.needs_contiguous else x, weight, bias)


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose product is served by the registry.

    Weights start normal with standard deviation 0.02 and biases at 0, as transformers initialises language models.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("in_features", in_features)
        check_int("out_features", out_features)
        check_bool("bias", bias)
        check_device(device)
        check_parameter_dtype(dtype)
        self.strategy = parse_enum(LinearStrategy, strategy, "strategy")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    #: a norm that the product applies to its rows by itself, as a fusion plan may ask; no part of this module
    input_norm: tuple[Any, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        if self.input_norm:
            return self._normed_product(input, self.input_norm[0])
        return linear(input, self.weight, self.bias, strategy=self.strategy)

    def _normed_product(self, input: Tensor, norm: Any) -> Tensor:
        config = norm.config
        options: dict[str, Any] = {
            "weight_offset": config.weight_offset,
            "cast_first": norm.cast_first,
            "strategy": self.strategy,
        }
        return norm_linear(input, norm.weight, self.weight, self.bias, config.eps, **options)


def may_overwrite(root: nn.Module, projection: nn.Module) -> bool:
    """Whether what ``projection`` returned inside ``root`` belongs to root alone, so that its memory can be taken.

    Not where gradients are recorded or the call is traced, where the projection is a user's own module, or where any
    hook in root, or a global one, may have kept the tensor.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(projection) is not Linear:
        return False
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks or "forward" in projection.__dict__:
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in root.modules())


def fuse_on_load(module: nn.Module, fused: str, parts: dict[str, int]) -> None:
    """Let ``load_state_dict`` take separate projections where ``module`` stores one fused weight.

    ``fused`` names a Linear child; where a state dict has ``parts`` (say q_proj, k_proj, v_proj, each with its number
    of output channels) they are joined along the output axis in that order.
    """
    module.register_load_state_dict_pre_hook(_FuseOnLoad(fused, tuple(parts), tuple(parts.values())))


@dataclass(frozen=True)
class _FuseOnLoad:
    """The hook behind ``fuse_on_load``; a class, because modules are pickled with their hooks."""

    fused: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]

    def __call__(self, module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{part}.{kind}" for part in self.parts]
            found = [key for key in keys if key in state_dict]
            if found and len(found) < len(keys):
                missing = ", ".join(key for key in keys if key not in found)
                raise ValueError(f"state_dict has {', '.join(found)} but not {missing}; {self.fused} needs all")
            if not found:
                continue
            for key in keys:
                check_tensor(key, state_dict[key])
                if not state_dict[key].dim():
                    raise ValueError(f"{key} has no axis; {self.fused} needs output channels")
            rows = tuple(state_dict[key].shape[0] for key in keys)
            if rows != self.rows:
                raise ValueError(f"{', '.join(keys)} have {rows} output channels; {self.fused} takes {self.rows}")
            state_dict[f"{prefix}{self.fused}.{kind}"] = torch.cat([state_dict.pop(key) for key in keys])

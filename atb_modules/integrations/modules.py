"""What the optimised modules of timm and transformers share: products of any projection, and torch's LayerNorm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from atb_modules.linear import linear
from atb_modules.norm.functional import layer_norm


def project(projection: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """What ``projection`` makes of x, by our products where it is a plain Linear; adapters and hooks run as they are.

    bias: taken instead of the projection's own, which has none then.
    """
    if type(projection) is nn.Linear and not is_watched(projection):
        return linear(x, projection.weight, projection.bias if bias is None else bias)
    out = projection(x)
    return out if bias is None else out + bias


def is_watched(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says: hooks (of its own or of all modules), or a forward of
    its own.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or _has_any_global_hook() or "forward" in module.__dict__


def normed(norm: Any, x: Tensor) -> Tensor:
    """Our LayerNorm with the module's parameters."""
    return layer_norm(x, norm.weight, norm.bias, float(norm.eps))


def over_last_axis(norm: Any) -> bool:
    return len(norm.normalized_shape) == 1


class FusedPlainLayerNorm(nn.LayerNorm):
    """One pass over each row."""

    def forward(self, input: Tensor) -> Tensor:
        return normed(self, input) if over_last_axis(self) else super().forward(input)


#: torch's class -> ours
CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: FusedPlainLayerNorm}

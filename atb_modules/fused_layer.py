"""FusedLayer: how a layer reads a fusion plan, which neighbours of it run as one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from atb_modules.fusions import DEFAULT_FUSIONS, Fusion
from atb_modules.linear import Linear
from atb_modules.norm import RMSNorm
from atb_modules.norm.add import add_norm
from atb_modules.strategies import AttentionStrategy, parse_enum


class FusedLayer(nn.Module):
    """What ``TransformerLayer`` is made of beside its parts: its fusions, and the places where they decide."""

    fusions: frozenset[Fusion] = DEFAULT_FUSIONS
    unfused_attention = False
    attention: Any
    mlp: Any
    attention_norm: Any
    placement: Any

    def use_fusions(self, fusions: Iterable[Fusion | str]) -> None:
        """Run as one kernel what ``fusions`` name, and all else apart; results stay the same but for rounding.

        ``optimize.planner`` decides them for a chip. A product takes its norm along where it is a ``Linear`` and the
        norm an ``RMSNorm`` without hooks; other parts of a user's own are left as they are.
        """
        chosen = frozenset(parse_enum(Fusion, word, "fusions") for word in fusions)
        self.fusions = chosen
        attention, mlp = self.attention, self.mlp
        for part in (attention, mlp):
            if hasattr(type(part), "fusions"):
                part.fusions = chosen
        if Fusion.ATTENTION not in chosen and getattr(attention, "strategy", None) is AttentionStrategy.AUTO:
            attention.strategy = AttentionStrategy.EAGER
            self.unfused_attention = True
        elif Fusion.ATTENTION in chosen and self.unfused_attention:
            attention.strategy, self.unfused_attention = AttentionStrategy.AUTO, False
        pre_norm = str(self.placement) == "pre"
        for norm, product in (
            (self.attention_norm, getattr(getattr(attention, "qkv", None), "qkv_proj", None)),
            (getattr(self, "mlp_norm", None), getattr(mlp, "gate_up_proj", None) or getattr(mlp, "up_proj", None)),
        ):
            if type(product) is Linear:
                takes = Fusion.NORM_MATMUL in chosen and pre_norm and _is_plain(norm)
                product.input_norm = (norm,) if takes and norm is not None else ()

    def _normed(self, norm: nn.Module, part: nn.Module, x: Tensor) -> Tensor:
        """``norm(x)``, or x where the first product of ``part`` normalises it."""
        return x if Fusion.NORM_MATMUL in self.fusions and _takes_norm(part, norm) else norm(x)

    def _add_norm(
        self, norm: nn.Module, branch: Tensor, x: Tensor, part: nn.Module | None = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``(norm(branch + x), branch + x)``; the sum twice where the first product of ``part`` normalises it."""
        if part is not None and Fusion.NORM_MATMUL in self.fusions and _takes_norm(part, norm):
            x = branch + x
            return x, x
        if Fusion.ADD_NORM in self.fusions:
            return add_norm(norm, branch, x, overwrite=overwrite)
        x = branch + x
        return norm(x), x


def _is_plain(norm: Any) -> bool:
    return type(norm) is RMSNorm and not (norm._forward_hooks or norm._forward_pre_hooks or "forward" in vars(norm))


def _takes_norm(part: nn.Module, norm: nn.Module) -> bool:
    """Whether the first product of an attention or a feed-forward has ``norm`` for its own."""
    for holder, name in ((getattr(part, "qkv", None), "qkv_proj"), (part, "gate_up_proj"), (part, "up_proj")):
        product = getattr(holder, name, None)
        if product is not None and getattr(product, "input_norm", ())[:1] == (norm,):
            return True
    return False

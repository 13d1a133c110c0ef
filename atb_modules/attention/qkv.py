"""Projections to queries, keys and values: fused, separate, or a user's own modules in a foreign layout."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor, nn

from atb_modules.checks import check_int, check_tensor, check_type
from atb_modules.linear import Linear, fuse_on_load
from atb_modules.strategies import parse_enum


class QKVLayout(StrEnum):
    """How the output channels of a fused qkv projection are ordered.

    QKV       q0 q1 q2 q3 | k0 k1 | v0 v1      all queries, all keys, all values: ours, timm's, Phi-3's
    GROUPED   q0 q1 k0 v0 | q2 q3 k1 v1        a key head after its query heads: Falcon, InternLM2
    PER_HEAD  q0 k0 v0 | q1 k1 v1              GROUPED with one query head a key head: GPT-NeoX, BLOOM
    """

    QKV = "qkv"
    GROUPED = "grouped"
    PER_HEAD = "per_head"


def split_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, layout: QKVLayout | str = QKVLayout.QKV
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused product (..., (num_heads + 2 * num_kv_heads) * head_dim) into heads.

    Returns q (..., num_heads, head_dim), k and v (..., num_kv_heads, head_dim); views where the layout allows it.
    """
    check_tensor("qkv", qkv, "a tensor (..., (num_heads + 2 * num_kv_heads) * head_dim)")
    check_int("head_dim", head_dim)
    if not qkv.dim():
        raise ValueError("qkv has no axis; allowed: (..., (num_heads + 2 * num_kv_heads) * head_dim)")
    layout = checked_layout("layout", layout, num_heads, num_kv_heads)
    return _split(qkv, num_heads, num_kv_heads, head_dim, layout)


def checked_layout(name: str, layout: QKVLayout | str, num_heads: int, num_kv_heads: int) -> QKVLayout:
    """The layout that ``layout``, the argument ``name``, stands for; raises where the heads do not go with it."""
    layout = parse_enum(QKVLayout, layout, name)
    check_heads(num_heads, num_kv_heads)
    if layout is QKVLayout.PER_HEAD and num_heads != num_kv_heads:
        raise ValueError(f"{name} 'per_head' needs num_kv_heads {num_kv_heads} equal to num_heads {num_heads}")
    return layout


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises unless both are positive ints and the first is a multiple of the second."""
    check_int("num_heads", num_heads)
    check_int("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads}; allowed: a divisor of num_heads {num_heads}")


def _split(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, layout: QKVLayout
) -> tuple[Tensor, Tensor, Tensor]:
    channels = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape[-1] != channels:
        raise ValueError(
            f"qkv has {qkv.shape[-1]} channels; {num_heads} heads and twice {num_kv_heads} kv heads of {head_dim} "
            f"make {channels}"
        )
    lead = qkv.shape[:-1]
    if layout is QKVLayout.QKV:
        heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=-2)
        return q, k, v
    group = num_heads // num_kv_heads
    heads = qkv.unflatten(-1, (num_kv_heads, group + 2, head_dim))
    q, k, v = heads.split([group, 1, 1], dim=-2)
    return q.reshape(*lead, num_heads, head_dim), k.squeeze(-2), v.squeeze(-2)


def convert_qkv_weight(
    weight: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    source: QKVLayout | str,
) -> Tensor:
    """Reorder a fused weight (channels, in) or bias (channels,) from a foreign layout to ``QKVLayout.QKV``."""
    check_tensor("weight", weight, "a tensor (channels, in) or (channels,)")
    if weight.dim() not in (1, 2):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; allowed: (channels, in) or (channels,)")
    layout = checked_layout("source", source, num_heads, num_kv_heads)
    check_int("head_dim", head_dim)
    channels = (num_heads + 2 * num_kv_heads) * head_dim
    if weight.shape[0] != channels:
        raise ValueError(
            f"weight has {weight.shape[0]} output channels; {num_heads} heads and twice {num_kv_heads} kv heads of "
            f"{head_dim} make {channels}"
        )
    parts = _split(weight.movedim(0, -1), num_heads, num_kv_heads, head_dim, layout)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1).movedim(-1, 0).contiguous()


class FusedQKV(nn.Module):
    """One projection for q, k and v, stored as ``qkv_proj``; loads ``q_proj``, ``k_proj``, ``v_proj`` as well."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        channels = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv_proj = Linear(hidden_size, channels, bias, strategy=strategy, device=device, dtype=dtype)
        rows = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        fuse_on_load(self, "qkv_proj", rows)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv_proj(hidden_states)
        return _split(qkv, self.num_heads, self.num_kv_heads, self.head_dim, QKVLayout.QKV)


class SeparateQKV(nn.Module):
    """Three projections, q from one input, k and v from another or the same; the modules may be the user's own."""

    def __init__(
        self, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module, num_heads: int, num_kv_heads: int
    ) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def queries(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., num_heads, head_dim)."""
        return self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1))

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(..., hidden) -> k, v (..., num_kv_heads, head_dim)."""
        k = self.k_proj(hidden_states).unflatten(-1, (self.num_kv_heads, -1))
        return k, self.v_proj(hidden_states).unflatten(-1, (self.num_kv_heads, -1))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries(hidden_states), *self.keys_values(hidden_states)


class ForeignQKV(nn.Module):
    """A user's own fused projection in any ``QKVLayout``; its parameters stay as they are."""

    def __init__(
        self, qkv_proj: nn.Module, layout: QKVLayout | str, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        self.qkv_proj = qkv_proj
        self.layout = checked_layout("qkv_layout", layout, num_heads, num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _split(self.qkv_proj(hidden_states), self.num_heads, self.num_kv_heads, self.head_dim, self.layout)


def projected_qkv(
    separate: tuple[nn.Module | None, nn.Module | None, nn.Module | None],
    qkv_proj: nn.Module | None,
    layout: QKVLayout | str,
    num_heads: int,
    num_kv_heads: int,
    cross: bool,
) -> tuple[SeparateQKV | ForeignQKV, int]:
    """A user's own projections (q, k and v, or one fused) as one module, and the head_dim that their sizes say."""
    given = [proj is not None for proj in separate]
    if any(given) if qkv_proj is not None else not all(given):
        raise ValueError("give either q_proj, k_proj and v_proj, or qkv_proj alone")
    check_heads(num_heads, num_kv_heads)
    named = dict(zip(("q_proj", "k_proj", "v_proj"), separate, strict=True)) if qkv_proj is None else {}
    for name, proj in named.items() if qkv_proj is None else (("qkv_proj", qkv_proj),):
        check_type(name, proj, nn.Module)
    total = out_features(qkv_proj if qkv_proj is not None else named["q_proj"])
    heads = num_heads + 2 * num_kv_heads if qkv_proj is not None else num_heads
    if total % heads or not total:
        raise ValueError(f"the projection has {total} output channels, which {heads} heads do not divide")
    head_dim = total // heads
    if qkv_proj is not None:
        return ForeignQKV(qkv_proj, layout, num_heads, num_kv_heads, head_dim), head_dim
    for name in ("k_proj", "v_proj"):
        if out_features(named[name]) != num_kv_heads * head_dim:
            raise ValueError(
                f"{name} has {out_features(named[name])} output channels; {num_kv_heads} kv heads of {head_dim} "
                f"make {num_kv_heads * head_dim}"
            )
    widths = {name: in_features(proj) for name, proj in named.items() if not cross or name != "q_proj"}
    if len({width for width in widths.values() if width is not None}) > 1:
        words = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ValueError(f"the projections take different numbers of channels: {words}; they must be equal")
    return SeparateQKV(*separate, num_heads, num_kv_heads), head_dim  # type: ignore[arg-type]  # checked above


def check_output(o_proj: nn.Module, channels: int) -> None:
    """Raises unless ``o_proj`` is a module that takes ``channels``, as far as its size is known."""
    check_type("o_proj", o_proj, nn.Module)
    takes = in_features(o_proj)
    if takes is not None and takes != channels:
        raise ValueError(f"o_proj takes {takes} channels; the heads give {channels}, they must be equal")


def out_features(projection: nn.Module | None) -> int:
    """Output channels of a user's projection, from ``out_features`` or the weight."""
    features = getattr(projection, "out_features", None)
    if features is None:
        weight = getattr(projection, "weight", None)
        if weight is None:
            raise TypeError(f"{type(projection).__name__} has neither out_features nor weight; its size is unknown")
        features = weight.shape[0]
    return int(features)


def in_features(projection: nn.Module | None) -> int | None:
    """Input channels of a user's projection, None where it does not say."""
    features = getattr(projection, "in_features", None)
    return int(features) if isinstance(features, int) else None

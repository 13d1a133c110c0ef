"""Rotary position embeddings: configuration, the tables, the op, and the weight converter between the two layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from atb_modules import kernels  # noqa: F401  (registers every kernel)
from atb_modules.attention.mrope import axis_of_frequency, checked_section
from atb_modules.attention.rope_scaling import RotaryScaling, attention_factor, scaled_frequencies
from atb_modules.checks import (
    check_bool,
    check_floating,
    check_int,
    check_number,
    check_tensor,
    check_type,
    is_floating,
    numbers,
)
from atb_modules.kernels.host_values import upload
from atb_modules.kernels.registry import resolve
from atb_modules.kernels.traits import RotaryTraits, count
from atb_modules.strategies import RotaryStrategy, parse_enum

#: Dtypes of positions.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class RotaryLayout(StrEnum):
    """Which channels form a pair: HALF (i, i + d/2), as Llama in transformers; INTERLEAVED (2i, 2i + 1), as GPT-J."""

    HALF = "half"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True)
class RotaryConfig:
    """Options of rotary embeddings.

    Args:
        base: the base of the frequencies (``rope_theta``).
        layout: a ``RotaryLayout`` or its word.
        partial_factor: share of head_dim that is rotated, 0 < share <= 1; the first channels are, their number rounded
            to the nearest int.
        scaling: a ``RotaryScaling``, or None.
        frequency_factors: one divisor a frequency, as some checkpoints carry them in a tensor; None for none.
        mrope_section: for positions of several axes (M-RoPE: time, height, width), how many frequencies each axis
            turns, rotary_dim / 2 in all; None where positions have one axis. Qwen2-VL, section 2.1.
        mrope_interleaved: whether the axes take turns (Qwen3-VL: T H W T H W ... T T), else each takes a run.
        strategy: a ``RotaryStrategy`` or its word.
    """

    base: float = 10000.0
    layout: RotaryLayout | str = RotaryLayout.HALF
    partial_factor: float = 1.0
    scaling: RotaryScaling | None = None
    frequency_factors: tuple[float, ...] | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    strategy: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", parse_enum(RotaryLayout, self.layout, "layout"))
        object.__setattr__(self, "strategy", parse_enum(RotaryStrategy, self.strategy, "strategy"))
        check_number("base", self.base, "a finite number greater than 1", lambda base: base > 1)
        check_number("partial_factor", self.partial_factor, "0 < partial_factor <= 1", lambda factor: 0 < factor <= 1)
        check_type("scaling", self.scaling, RotaryScaling, optional=True)
        factors = numbers("frequency_factors", self.frequency_factors, optional=True)
        object.__setattr__(self, "frequency_factors", factors)
        object.__setattr__(self, "mrope_section", checked_section(self.mrope_section, self.mrope_interleaved))

    def rotary_dim(self, head_dim: int) -> int:
        """Channels that are rotated."""
        return round(head_dim * self.partial_factor)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for positions. Holds no tensor: nothing to round, to save or to leave uninitialised.

    Frequencies are Python floats; angles are products in float32, whatever dtype the model has.
    """

    def __init__(self, head_dim: int, config: RotaryConfig | None = None) -> None:
        super().__init__()
        check_int("head_dim", head_dim)
        check_type("config", config, RotaryConfig, optional=True)
        self.config = config if config is not None else RotaryConfig()
        self.rotary_dim = self.config.rotary_dim(head_dim)
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"head_dim is {head_dim} and partial_factor {self.config.partial_factor}: {self.rotary_dim} rotated "
                "channels; allowed: an even number of at least 2"
            )
        factors = self.config.frequency_factors
        if factors is not None and len(factors) != self.rotary_dim // 2:
            raise ValueError(f"frequency_factors has {len(factors)} numbers; allowed: {self.rotary_dim // 2}")
        self.axis_of_frequency = None
        if self.config.mrope_section is not None:
            self.axis_of_frequency = axis_of_frequency(
                self.config.mrope_section, self.config.mrope_interleaved, self.rotary_dim // 2
            )
        scaling = self.config.scaling
        self.attention_factor = attention_factor(scaling)
        if not self.attention_factor <= torch.finfo(torch.float32).max:
            raise ValueError(
                f"scaling is {scaling}: cos and sin times {self.attention_factor}; allowed: a factor finite in float32"
            )
        self.depends_on_length = scaling is not None and scaling.depends_on_length
        short = self._checked_frequencies(1)
        self._frequencies = None if self.depends_on_length else short
        if scaling is not None and self.depends_on_length:
            self._checked_frequencies((scaling.original_max_positions or 1) + 1)

    def _checked_frequencies(self, length: int) -> tuple[float, ...]:
        """``frequencies``; ValueError where float32 cannot hold them."""
        try:
            values = self.frequencies(length)
        except OverflowError:
            values = (math.inf,)
        if not all(value <= torch.finfo(torch.float32).max for value in values):
            raise ValueError(f"rotary is {self.config}; allowed: options whose frequencies are finite in float32")
        return values

    def frequencies(self, length: int) -> tuple[float, ...]:
        """The frequencies for a sequence of ``length`` tokens, rotary_dim / 2 numbers."""
        values = scaled_frequencies(self.rotary_dim, self.config.base, self.config.scaling, length)
        factors = self.config.frequency_factors
        if factors is not None:
            values = [value / factor for value, factor in zip(values, factors, strict=True)]
        return tuple(values)

    def forward(self, position_ids: Tensor, length: int | None = None, *, axes: bool = False) -> tuple[Tensor, Tensor]:
        """cos and sin of every position.

        Args:
            position_ids: integers of any shape.
            axes: whether the first axis of position_ids holds one position an axis of ``mrope_section``; it is gone
                from the result. Without it, all axes have the same positions, as text has them.
            length: tokens of the longest sequence; needed by dynamic NTK and LongRoPE alone, where None takes the
                greatest position plus one (which reads it from the device).

        Returns:
            cos, sin: float32, ``position_ids.shape + (rotary_dim / 2,)``.
        """
        check_tensor("position_ids", position_ids, "a tensor of integers")
        if position_ids.dtype not in INTEGERS:
            raise TypeError(f"position_ids is {position_ids.dtype}; allowed: {', '.join(map(str, INTEGERS))}")
        frequencies = self._frequencies
        if frequencies is None:
            if not isinstance(length, torch.SymInt):
                check_int("length", length, least=0, optional=True)
            if length is None:
                length = int(position_ids.max()) + 1 if position_ids.numel() else 1
            frequencies = self.frequencies(length)
        inv_freq = torch.tensor(frequencies, dtype=torch.float32)
        if position_ids.device.type != "cpu":
            inv_freq = upload(inv_freq, position_ids.device)
        # Products, cosines and sines are not on autocast's lists: they stay float32.
        positions = position_ids.to(torch.float32)
        positions = self._by_frequency(positions) if axes else positions.unsqueeze(-1)
        angles = positions * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin

    def _by_frequency(self, positions: Tensor) -> Tensor:
        """Positions (axes, ...) as (..., frequencies): each frequency turns by the position of its axis."""
        if self.axis_of_frequency is None:
            raise ValueError("axes is True and mrope_section None; allowed: a RotaryConfig with mrope_section")
        count = len(self.config.mrope_section or ())
        if not positions.dim() or positions.shape[0] != count:
            raise ValueError(f"position_ids has shape {tuple(positions.shape)}; allowed: ({count}, ...), one an axis")
        axes = torch.tensor(self.axis_of_frequency)
        if positions.device.type != "cpu":
            axes = upload(axes, positions.device)
        return positions.movedim(0, -1).index_select(-1, axes)

    def extra_repr(self) -> str:
        scaling = self.config.scaling
        text = f"rotary_dim={self.rotary_dim}, base={self.config.base:g}, layout={self.config.layout}"
        return text if scaling is None else f"{text}, scaling={scaling.kind}, factor={scaling.factor:g}"


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: RotaryLayout | str = RotaryLayout.HALF,
    strategy: str = "auto",
    overwrite: bool = False,
) -> Tensor:
    """Rotate x by the angles of its tokens.

    Args:
        x: (..., tokens, heads, head_dim).
        cos, sin: (..., tokens, rotary_dim / 2), floating, read as float32 (float64 for such an x); leading axes equal
            x's or broadcast to them. Channels past rotary_dim pass through.
        layout: a ``RotaryLayout`` or its word.
        overwrite: whether the result may take x's memory, where no gradient is recorded.
    """
    layout = parse_enum(RotaryLayout, layout, "layout")
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not is_floating(tensor):
            check_floating(name, tensor)
    if overwrite is not True and overwrite is not False:
        check_bool("overwrite", overwrite)
    if x.dim() < 3 or cos.dim() < 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and cos {tuple(cos.shape)}; allowed: (..., tokens, heads, head_dim) and "
            "(..., tokens, rotary_dim / 2)"
        )
    if cos.shape != sin.shape:
        raise ValueError(f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; they must be equal")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"cos has {cos.shape[-1]} angles; x of head_dim {x.shape[-1]} allows {x.shape[-1] // 2}")
    if cos.shape[-2] != x.shape[-3]:
        raise ValueError(f"cos has {cos.shape[-2]} tokens; x has {x.shape[-3]}, they must be equal")
    lead = zip(reversed(cos.shape[:-2]), reversed(x.shape[:-3]), strict=False)
    if cos.dim() >= x.dim() or any(have != 1 and have != want for have, want in lead):
        raise ValueError(f"cos has shape {tuple(cos.shape)}; its leading axes must broadcast to x {tuple(x.shape)}")
    if cos.device != x.device or sin.device != x.device:
        raise ValueError(f"cos is on {cos.device} and sin on {sin.device}; x is on {x.device}, they must be equal")
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(compute), sin.to(compute)
    heads, head_dim = x.shape[-2:]
    tokens = x.shape[:-2]
    traits = RotaryTraits(
        device_type=x.device.type,
        dtype=x.dtype,
        tokens=count(tokens),
        num_heads=heads,
        head_dim=head_dim,
        rotary_dim=2 * cos.shape[-1],
        interleaved=layout is RotaryLayout.INTERLEAVED,
        requires_grad=torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad or sin.requires_grad),
        contiguous=x.is_contiguous(),
    )
    kernel = resolve("rotary", None, traits, strategy)
    function = kernel.choose_function(overwrite, traits)
    if x.dim() == 3:
        return function(x, cos, sin, layout is RotaryLayout.INTERLEAVED)
    # Written out: -1 for the tokens would be ambiguous where another axis is 0.
    cos, sin = (t.expand(*tokens, t.shape[-1]).reshape(traits.tokens, t.shape[-1]) for t in (cos, sin))
    flat = function(x.reshape(traits.tokens, heads, head_dim), cos, sin, layout is RotaryLayout.INTERLEAVED)
    return flat.reshape(x.shape)


def convert_rotary_weight(
    weight: Tensor,
    num_heads: int,
    source: RotaryLayout | str,
    target: RotaryLayout | str,
    rotary_dim: int | None = None,
) -> Tensor:
    """Reorder the output channels of a q or k projection so that it rotates the same in the other layout.

    Args:
        weight: (num_heads * head_dim, in) or a bias (num_heads * head_dim,).
        num_heads: heads in the weight.
        source, target: ``RotaryLayout`` of the given and of the returned weight.
        rotary_dim: rotated channels of each head; None for all.
    """
    source, target = parse_enum(RotaryLayout, source, "source"), parse_enum(RotaryLayout, target, "target")
    check_tensor("weight", weight, "a tensor (num_heads * head_dim, in) or (num_heads * head_dim,)")
    check_int("num_heads", num_heads)
    check_int("rotary_dim", rotary_dim, least=2, optional=True)
    if not weight.dim():
        raise ValueError("weight has no axis; allowed: (num_heads * head_dim, in) or (num_heads * head_dim,)")
    if weight.shape[0] % num_heads:
        raise ValueError(f"weight has {weight.shape[0]} rows, which num_heads {num_heads} does not divide")
    if source is target:
        return weight
    per_head = weight.reshape(num_heads, weight.shape[0] // num_heads, *weight.shape[1:])
    rotary_dim = per_head.shape[1] if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or rotary_dim > per_head.shape[1]:
        raise ValueError(f"rotary_dim is {rotary_dim}; allowed: an even number up to head_dim {per_head.shape[1]}")
    turned, kept = per_head[:, :rotary_dim], per_head[:, rotary_dim:]
    split = (2, rotary_dim // 2) if source is RotaryLayout.HALF else (rotary_dim // 2, 2)
    turned = turned.reshape(num_heads, *split, *weight.shape[1:]).transpose(1, 2).reshape(turned.shape)
    return torch.cat([turned, kept], dim=1).reshape(weight.shape)

"""Rotary frequencies of the scaling family: plain, linear, dynamic NTK, YaRN, Llama 3, LongRoPE.

Computed in Python floats (float64), so that no buffer can be rounded by a dtype conversion or left empty by meta-device
construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from atb_modules.checks import check_bool, check_int, check_number, check_positive, numbers
from atb_modules.strategies import parse_enum


class RopeScalingKind(StrEnum):
    """Which rule stretches the frequencies."""

    LINEAR = "linear"  # positions divided by the factor (Chen et al., 2023)
    DYNAMIC = "dynamic"  # the base grows with the length (NTK-aware)
    YARN = "yarn"  # by parts, with a temperature (Peng et al., 2023)
    LLAMA3 = "llama3"  # low frequencies divided, high kept, a ramp between
    LONGROPE = "longrope"  # one factor a frequency, short and long (Ding et al., 2024)


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the trained length.

    The kinds that depend on the length, dynamic and longrope, follow the longest row of a pass, for all of its rows.

    Args:
        kind: a ``RopeScalingKind`` or its word.
        factor: how many times longer.
        original_max_positions: the trained length; required by all kinds but linear.
        attention_factor: what cos and sin are multiplied with; None takes the kind's own formula.
        mscale, mscale_all_dim: YaRN's two temperatures as DeepSeek writes them.
        beta_fast, beta_slow, truncate: YaRN's ramp.
        low_freq_factor, high_freq_factor: Llama 3's ramp.
        short_factor, long_factor: LongRoPE's factors, one a frequency.
    """

    kind: RopeScalingKind | str
    factor: float = 1.0
    original_max_positions: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", parse_enum(RopeScalingKind, self.kind, "kind"))
        check_positive("factor", self.factor)
        if self.kind is not RopeScalingKind.LINEAR and self.original_max_positions is None:
            raise ValueError(f"original_max_positions is None; {self.kind} needs a positive int")
        check_int("original_max_positions", self.original_max_positions, optional=True)
        check_positive("attention_factor", self.attention_factor, optional=True)
        for name in ("mscale", "mscale_all_dim"):
            check_number(name, getattr(self, name), "a finite number >= 0", lambda scale: scale >= 0, optional=True)
        for name in ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        check_bool("truncate", self.truncate)
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, numbers(name, getattr(self, name), optional=True))
        if self.kind is RopeScalingKind.LONGROPE and (not self.short_factor or not self.long_factor):
            raise ValueError("short_factor and long_factor are both required by longrope, one number a frequency")
        if self.kind is RopeScalingKind.LLAMA3 and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}, low_freq_factor {self.low_freq_factor}; "
                "the first must be greater"
            )
        if self.kind is RopeScalingKind.YARN and self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast is {self.beta_fast}, beta_slow {self.beta_slow}; the first must not be smaller"
            )
        if self.kind is RopeScalingKind.LONGROPE and self.factor > 1 and self.original_max_positions == 1:
            raise ValueError("original_max_positions is 1; longrope with a factor above 1 needs at least 2")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence."""
        return self.kind in (RopeScalingKind.DYNAMIC, RopeScalingKind.LONGROPE)


def plain_frequencies(rotary_dim: int, base: float) -> list[float]:
    """``base^(-2i / rotary_dim)`` for i in 0 .. rotary_dim / 2."""
    return [base ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]


def scaled_frequencies(rotary_dim: int, base: float, scaling: RotaryScaling | None, length: int) -> list[float]:
    """The frequencies of ``scaling`` for a sequence of ``length`` tokens."""
    if scaling is None:
        return plain_frequencies(rotary_dim, base)
    if scaling.kind is RopeScalingKind.LINEAR:
        return [f / scaling.factor for f in plain_frequencies(rotary_dim, base)]
    if scaling.kind is RopeScalingKind.DYNAMIC:
        return _dynamic(rotary_dim, base, scaling, length)
    if scaling.kind is RopeScalingKind.YARN:
        return _yarn(rotary_dim, base, scaling)
    if scaling.kind is RopeScalingKind.LLAMA3:
        return [_llama3(f, scaling) for f in plain_frequencies(rotary_dim, base)]
    return _longrope(rotary_dim, base, scaling, length)


def attention_factor(scaling: RotaryScaling | None) -> float:
    """What cos and sin are multiplied with."""
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind is RopeScalingKind.YARN:
        if scaling.mscale and scaling.mscale_all_dim:
            return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)
        return temperature(scaling.factor, 1.0)
    if scaling.kind is RopeScalingKind.LONGROPE and scaling.factor > 1.0:
        return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_max_positions or 1))
    return 1.0


def temperature(factor: float, mscale: float) -> float:
    """YaRN's ``0.1 * mscale * ln(factor) + 1``, 1 where nothing is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic(rotary_dim: int, base: float, scaling: RotaryScaling, length: int) -> list[float]:
    # The base becomes base * stretch^(d / (d - 2)); as factors of each frequency no power of it can overflow.
    plain = plain_frequencies(rotary_dim, base)
    trained = scaling.original_max_positions or 1
    stretch = 1.0 + scaling.factor * (max(length, trained) - trained) / trained
    # The first frequency is base^0, whatever the base; two channels have no other.
    return plain[:1] + [plain[i] * stretch ** (-2.0 * i / (rotary_dim - 2)) for i in range(1, len(plain))]


def _yarn(rotary_dim: int, base: float, scaling: RotaryScaling) -> list[float]:
    def correction(rotations: float) -> float:
        trained = scaling.original_max_positions or 1
        turns = trained / (rotations * 2 * math.pi)
        # A quotient too small for float64 has a logarithm all the same.
        log = math.log(turns) if turns > 0 else math.log(trained) - math.log(rotations) - math.log(2 * math.pi)
        return rotary_dim * log / (2 * math.log(base))

    low, high = correction(scaling.beta_fast), correction(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i, plain in enumerate(plain_frequencies(rotary_dim, base)):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(plain / scaling.factor * interpolated + plain * (1.0 - interpolated))
    return frequencies


def _llama3(frequency: float, scaling: RotaryScaling) -> float:
    trained = scaling.original_max_positions or 1
    wavelength = 2 * math.pi / frequency
    if wavelength > trained / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wavelength < trained / scaling.high_freq_factor:
        return frequency
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (trained / wavelength - scaling.low_freq_factor) / span
    return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency


def _longrope(rotary_dim: int, base: float, scaling: RotaryScaling, length: int) -> list[float]:
    long = length > (scaling.original_max_positions or 1)
    factors = (scaling.long_factor if long else scaling.short_factor) or ()
    if len(factors) != rotary_dim // 2:
        raise ValueError(f"{'long' if long else 'short'}_factor has {len(factors)} numbers; allowed: {rotary_dim // 2}")
    return [plain / factor for plain, factor in zip(plain_frequencies(rotary_dim, base), factors, strict=True)]

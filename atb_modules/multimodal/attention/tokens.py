"""What a call brings: both modalities dense, or packed with their layout, and the way back to the caller's shape.

Letters in shapes: B rows of the batch, V vision and T text tokens a row, N packed tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atb_modules.attention.masking import pack_padded, unpack_padded
from atb_modules.attention.rope import INTEGERS
from atb_modules.checks import check_floating, check_tensor, check_type
from atb_modules.multimodal.attention.spec import MultiModalLayout, checked_lengths

RotaryTables = tuple[Tensor, Tensor]
Lengths = Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of one modality: (B, tokens, hidden), or packed (N, hidden) with the ``real`` ones of a padded batch."""

    name: str
    states: Tensor
    real: Tensor | None = None

    def unpack(self, out: Tensor) -> Tensor:
        """``out``, computed for these tokens, in the shape that the caller gave; padding is 0."""
        return out if self.real is None else unpack_padded(out, self.real)

    def positions(self, positions: Tensor | None) -> Tensor | None:
        """The caller's positions, those of the real tokens alone where they were packed."""
        if positions is None:
            return None
        name = f"{self.name}_positions"
        check_tensor(name, positions, "a tensor of integers")
        if positions.dtype not in INTEGERS:
            raise TypeError(f"{name} is {positions.dtype}; allowed: {', '.join(map(str, INTEGERS))}")
        given = self._given
        allowed = [given] if len(given) == 1 else [given[1:], (1, given[1]), given]
        if tuple(positions.shape) not in allowed:
            words = " or ".join(map(str, dict.fromkeys(allowed)))
            raise ValueError(f"{name} has shape {tuple(positions.shape)}; allowed: {words}, one a token")
        return positions if self.real is None else positions.expand(given)[self.real]

    def tables(self, tables: RotaryTables | None) -> RotaryTables | None:
        """The caller's cos and sin, likewise."""
        if tables is None:
            return None
        name = f"{self.name}_tables"
        if not isinstance(tables, (tuple, list)) or len(tables) != 2:
            raise TypeError(f"{name} is {type(tables).__name__}; allowed: the pair (cos, sin)")
        given = self._given
        for part in tables:
            check_floating(name, part)
            fits = part.dim() >= 2 and part.dim() <= len(given) + 1 and part.shape[-2] == given[-1]
            if not fits or (part.dim() == 3 and part.shape[0] not in (1, given[0])):
                raise ValueError(
                    f"{name} has shape {tuple(part.shape)}; allowed: (.., {given[-1]}, rotary_dim / 2) that broadcasts "
                    f"to the tokens {given}"
                )
        cos, sin = tables
        if cos.shape != sin.shape:
            raise ValueError(f"{name} has cos {tuple(cos.shape)} and sin {tuple(sin.shape)}; they must be equal")
        if self.real is None:
            return cos, sin
        return cos.expand(*given, cos.shape[-1])[self.real], sin.expand(*given, sin.shape[-1])[self.real]

    @property
    def _given(self) -> tuple[int, ...]:
        """Rows and tokens of what the caller gave."""
        return tuple(self.states.shape[:-1]) if self.real is None else tuple(self.real.shape)


def gather_tokens(
    vision: Tensor | None,
    text: Tensor | None,
    layout: MultiModalLayout | None,
    vision_mask: Tensor | None,
    text_mask: Tensor | None,
    vision_lengths: Lengths | None,
    text_lengths: Lengths | None,
    image_lengths: Sequence[Sequence[int]] | None,
    hidden_size: int,
    most: tuple[int, int],
    pack: bool = False,
) -> tuple[Tokens, Tokens, MultiModalLayout | None]:
    """The tokens of both modalities, packed where rows have padding, several images, or where ``pack`` asks for it."""
    check_type("layout", layout, MultiModalLayout, optional=True)
    vision, text = both_streams(vision, text, hidden_size, packed=layout is not None)
    if layout is not None:
        extras = (vision_mask, text_mask, vision_lengths, text_lengths, image_lengths)
        if any(extra is not None for extra in extras):
            raise ValueError("layout is given with masks or lengths; allowed: one of them, a layout says it all")
        layout.check(vision.shape[0], text.shape[0])
        _check_longest(layout, most)
        return Tokens("vision", vision), Tokens("text", text), layout
    for name, states, length in (("vision", vision, most[0]), ("text", text, most[1])):
        if states.shape[1] > length:
            raise ValueError(f"{name} has {states.shape[1]} tokens; {name}_seq_len allows {length}")
    if vision.shape[0] != text.shape[0]:
        raise ValueError(f"vision has batch {vision.shape[0]} and text {text.shape[0]}; they must be equal")
    vision_mask = _mask_of("vision", vision, vision_mask, vision_lengths)
    text_mask = _mask_of("text", text, text_mask, text_lengths)
    if vision_mask is None and text_mask is None and image_lengths is None and not pack:
        return Tokens("vision", vision), Tokens("text", text), None
    vision, own_lengths, vision_real = pack_padded(vision, vision_mask)
    text, other_lengths, text_real = pack_padded(text, text_mask)
    layout = MultiModalLayout.from_lengths(own_lengths, other_lengths, image_lengths, text.device)
    return Tokens("vision", vision, vision_real), Tokens("text", text, text_real), layout


def both_streams(
    vision: Tensor | None, text: Tensor | None, hidden_size: int, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """Two tensors of tokens; a modality that is None has none. Raises where they are not of the shape asked for."""
    words = f"({'' if packed else 'batch, '}tokens, {hidden_size})"
    given = text if text is not None else vision
    if given is None:
        raise ValueError(f"vision and text are None; allowed: at least one tensor {words}")
    for name, states in (("vision", vision), ("text", text)):
        if states is None:
            continue
        check_floating(name, states, f"a tensor {words}")
        if states.dim() != (2 if packed else 3) or states.shape[-1] != hidden_size:
            more = " with a layout" if packed else ", or packed (tokens, hidden) with a layout"
            raise ValueError(f"{name} has shape {tuple(states.shape)}; allowed: {words}{more}")
    nothing = given.new_empty(*given.shape[:-2], 0, hidden_size)
    vision, text = (nothing if states is None else states for states in (vision, text))
    if vision.device != text.device:
        raise ValueError(f"vision is on {vision.device}; text is on {text.device}, they must be equal")
    if vision.dtype != text.dtype and not torch.is_autocast_enabled(text.device.type):
        raise TypeError(f"vision is {vision.dtype}; text is {text.dtype}, they must be equal")
    return vision, text


def _mask_of(name: str, states: Tensor, mask: Tensor | None, lengths: Lengths | None) -> Tensor | None:
    """Real tokens, bool (B, tokens); None where all are."""
    batch, tokens = states.shape[:2]
    if mask is not None and lengths is not None:
        raise ValueError(f"{name}_mask and {name}_lengths are given; allowed: one of them")
    if lengths is not None:
        values = checked_lengths(f"{name}_lengths", lengths, most=tokens)
        if len(values) != batch:
            raise ValueError(f"{name}_lengths has {len(values)} rows; {name} has {batch}")
        if states.device.type == "meta":
            raise ValueError(f"{name}_lengths is given and {name} is on meta; allowed there: neither lengths nor masks")
        mask = torch.arange(tokens, device=states.device) < torch.tensor(values, device=states.device)[:, None]
    elif mask is not None:
        check_tensor(f"{name}_mask", mask)
        if tuple(mask.shape) != (batch, tokens) or mask.dtype.is_floating_point or mask.dtype.is_complex:
            raise ValueError(
                f"{name}_mask is {mask.dtype} {tuple(mask.shape)}; allowed: bool or integer 0/1 ({batch}, {tokens}), "
                "1 = real"
            )
        if mask.device != states.device or mask.device.type == "meta":
            raise ValueError(f"{name}_mask is on {mask.device}; {name} is on {states.device}, equal and not meta")
        mask = mask != 0
    return None if mask is None or bool(mask.all()) else mask


def _check_longest(layout: MultiModalLayout, most: tuple[int, int]) -> None:
    if torch.compiler.is_compiling() or layout.cu_vision.device.type == "meta" or not layout.samples:
        return
    for name, starts, length in (("vision", layout.cu_vision, most[0]), ("text", layout.cu_text, most[1])):
        longest = int(starts.diff().max())
        if longest > length:
            raise ValueError(f"a sample of layout has {longest} {name} tokens; {name}_seq_len allows {length}")

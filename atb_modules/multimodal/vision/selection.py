"""Which layers' output a tower gives: "layer -2" has one meaning here.

A tower of n layers passes n + 1 hidden states: 0 is what goes into the first layer (after CLIP's first norm), k is
what came out of k layers, none of them normed by the norm behind the last layer. That is transformers'
``hidden_states`` tuple, and negative numbers count from its end: -1 is the output of the last layer, -2 (LLaVA) of the
last but one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SelectLayer = int | Sequence[int] | None


@dataclass(frozen=True)
class Selection:
    """The states that a tower returns, joined along the channels.

    Attributes:
        states: numbers of hidden states, 0 to the number of layers.
        norm: whether each passes the norm behind the last layer.
    """

    states: tuple[int, ...]
    norm: bool


def resolve_selection(
    select_layer: SelectLayer, final_norm: bool | None, num_layers: int, has_norm: bool, last_is_normed: bool
) -> Selection:
    """The selection that the arguments of a tower stand for.

    Args:
        select_layer: a hidden state's number or several; None is the last one.
        final_norm: whether they are normed. None does what transformers does: with no layer selected the output is
            its ``last_hidden_state`` (normed in SigLIP and DINOv2, not in CLIP and Qwen-VL), a selected one is not
            normed.
        num_layers: of the tower.
        has_norm: whether the tower has a norm behind its last layer.
        last_is_normed: whether the family's ``last_hidden_state`` is normed.

    Raises:
        ValueError, TypeError: a number past the tower, or a norm that it does not have.
    """
    if final_norm is not None and not isinstance(final_norm, bool):
        raise TypeError(f"final_norm is {final_norm!r} ({type(final_norm).__name__}); allowed: True, False, None")
    if final_norm and not has_norm:
        raise ValueError("final_norm is True; this tower has no norm behind its last layer, allowed: False, None")
    if select_layer is None:
        return Selection((num_layers,), last_is_normed if final_norm is None else final_norm)
    several = isinstance(select_layer, Sequence) and not isinstance(select_layer, str)
    chosen = list(select_layer) if several else [select_layer]  # type: ignore[arg-type]  # several says which
    if not chosen:
        raise ValueError("select_layer is empty; allowed: an int, or a list of at least one")
    states = []
    for layer in chosen:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"select_layer is {select_layer!r}; allowed: an int, a list of ints, None")
        if not -(num_layers + 1) <= layer <= num_layers:
            raise ValueError(
                f"select_layer is {layer}; a tower of {num_layers} layers allows {-num_layers - 1} to {num_layers}"
            )
        states.append(layer if layer >= 0 else num_layers + 1 + layer)
    return Selection(tuple(states), bool(final_norm))


def checked_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Indices of layers, from 0, as hidden states' numbers; raises where one is none of the tower's."""
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise TypeError(f"layers is {layers!r:.80} ({type(layers).__name__}); allowed: a list of ints")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layers is {list(layers)!r}; allowed: ints")
        if not 0 <= layer < num_layers:
            raise ValueError(f"layers has {layer}; a tower of {num_layers} layers allows 0 to {num_layers - 1}")
    return tuple(layer + 1 for layer in layers)

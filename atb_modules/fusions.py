"""Which neighbours of a layer run as one kernel: the words that a fusion plan is made of and a layer reads."""

from __future__ import annotations

from enum import StrEnum


class Fusion(StrEnum):
    """Neighbouring steps of a layer that one kernel can serve."""

    ADD_NORM = "add+norm"  # the residual sum and the norm behind it
    NORM_MATMUL = "norm+matmul"  # a norm and the product that reads it
    ROTARY_APPEND = "rotary+append"  # rotated keys go straight into the cache
    GATE = "activation*up"  # the activation of the gate, times the other half
    ATTENTION = "attention"  # scores, softmax and values, without a matrix of scores


#: What a layer fuses without a plan.
DEFAULT_FUSIONS = frozenset({Fusion.ADD_NORM, Fusion.ROTARY_APPEND, Fusion.GATE, Fusion.ATTENTION})

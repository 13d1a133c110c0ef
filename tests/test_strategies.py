"""Local overrides of strategies: each family has its own, whatever the others are called."""

from __future__ import annotations

import itertools

import pytest

from atb_modules.strategies import _FAMILY_WORDS, OP_FAMILIES, effective_strategy, use_strategy

WORDS = [word for word, family in _FAMILY_WORDS.items() if "reference" in set(family)]


@pytest.mark.parametrize("one,other", list(itertools.permutations(WORDS, 2)))
def test_the_same_word_for_two_families(one, other):
    families = {_FAMILY_WORDS[one], _FAMILY_WORDS[other]}
    with use_strategy(**{one: "reference", other: "reference"}):
        for op, family in OP_FAMILIES.items():
            assert (effective_strategy(op, "auto") == "reference") is (family in families), op
        with use_strategy(**{one: "auto"}):
            for op, family in OP_FAMILIES.items():
                assert (effective_strategy(op, "auto") == "reference") is (family is _FAMILY_WORDS[other]), op
    with use_strategy(**{one: "reference"}), use_strategy(**{other: "reference"}):
        for op, family in OP_FAMILIES.items():
            assert (effective_strategy(op, "auto") == "reference") is (family in families), op

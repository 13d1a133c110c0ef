"""Attention, norms and feed-forwards of timm's and transformers' models, served by our kernels in place.

A module that we know takes on one of our classes, a subclass of its own with another ``forward``: parameters, hooks,
adapters, names in the state dict and ``isinstance`` stay as they are, other models of the same class are untouched,
and ``restore`` gives the class back.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from typing import TypeVar

from torch import nn

from atb_modules.integrations import modules

logger = logging.getLogger("atb_modules.optimize")

Model = TypeVar("Model", bound=nn.Module)


def apply_optimizations(model: Model) -> Model:
    """Let our kernels serve the attention, norms and feed-forwards of ``model``, which is changed in place.

    Knows timm's vision transformers (ViT, DeiT, SigLIP, EVA, DINOv3, BEiT and what else is built of the same parts) and
    the Llama, Mistral, Qwen2 and Qwen3 models of transformers, whose attention is set to "atb". Applied twice, it does
    what it does once. What looks like attention and is not known keeps its own forward, and is logged (logger
    ``atb_modules.optimize``). torch.compile and torch.export trace the result; symbolic tracing (torch.fx,
    torch.jit.script) does not: trace before, or ``restore`` first.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: where ``model`` is no module.
        ValueError: where nothing in it is known.
    """
    _check(model)
    table = _known()
    ours = set(table.values())
    set_by_config = _attention_classes()
    done: Counter[str] = Counter()
    left: Counter[str] = Counter()
    already = False
    for module in model.modules():
        kind = type(module)
        already |= kind in ours
        if kind in table and not _has_foreign_forward(module):
            module.__class__ = table[kind]
            done[kind.__name__] += 1
        elif kind in table or ("Attention" in kind.__name__ and kind not in ours | set_by_config):
            left[kind.__name__] += 1
    done.update(_set_attention(model))
    if not done and not already:
        raise ValueError(
            f"model is {type(model).__name__}, in which nothing is known; known are "
            + ", ".join(sorted(kind.__name__ for kind in table))
        )
    logger.info("served by our kernels: %s; left as they are: %s", _listed(done), _listed(left))
    return model


def restore(model: Model) -> Model:
    """Undo ``apply_optimizations``: every module has its own class again, and computes what it did to the bit.

    Returns:
        ``model`` itself, unchanged where nothing had been applied.
    """
    _check(model)
    originals = {new: old for old, new in _known().items()}
    for module in model.modules():
        if type(module) in originals:
            module.__class__ = originals[type(module)]
    _restore_attention(model)
    return model


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; allowed: a torch.nn.Module")


def _has_foreign_forward(module: nn.Module) -> bool:
    """Whether somebody gave the module, or its class, another forward than its library did."""
    home, _, _ = type(module).__module__.partition(".")
    return "forward" in module.__dict__ or type(module).forward.__module__.partition(".")[0] != home


def _known() -> dict[type[nn.Module], type[nn.Module]]:
    """A library's class -> ours, of the libraries that are imported: a model of another cannot be there."""
    table = dict(modules.CLASSES)
    if "timm" in sys.modules:
        from atb_modules.integrations import timm

        table |= timm.CLASSES
    if "transformers" in sys.modules:
        from atb_modules.integrations import transformers_modules

        table |= transformers_modules.CLASSES
    return table


def _set_attention(model: nn.Module) -> list[str]:
    if "transformers" not in sys.modules:
        return []
    from atb_modules.integrations.transformers_modules import set_attention

    return set_attention(model)


def _attention_classes() -> set[type[nn.Module]]:
    """Modules that ask their model's config which attention to call."""
    if "transformers" not in sys.modules:
        return set()
    from atb_modules.integrations.transformers_modules import ATTENTION

    return set(ATTENTION)


def _restore_attention(model: nn.Module) -> None:
    if "transformers" in sys.modules:
        from atb_modules.integrations.transformers_modules import restore_attention

        restore_attention(model)


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items())) or "none"

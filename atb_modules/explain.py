"""explain: which kernel serves a call, and why not the others, as a table of text and of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from atb_modules import ops
from atb_modules.kernels.registry import Explanation, explain_call, record_choices
from atb_modules.strategies import OP_FAMILIES


@dataclass(frozen=True)
class Explanations:
    """The choices of a whole call, one table an op and kernel; ``str()`` joins them."""

    tables: tuple[Explanation, ...]

    def __str__(self) -> str:
        return "\n".join(str(table) for table in self.tables)

    def chosen(self) -> dict[str, tuple[str, ...]]:
        """op -> the strategies that served it."""
        found: dict[str, tuple[str, ...]] = {}
        for table in self.tables:
            found[table.op] = (*found.get(table.op, ()), table.chosen or "none")
        return found


def explain(what: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation | Explanations:
    """Which kernels serve a call.

    ``explain("attention", q, k, v, spec)`` takes an op of ``atb_modules.ops`` by name with its arguments and runs
    nothing; ``explain(layer, x)`` runs a module or function once, without gradients, and tells every choice inside.

    Raises:
        ValueError, TypeError: for an op that is not there, something else than a name, module or function, or
            arguments that the op itself refuses.
    """
    if isinstance(what, str):
        if what not in OP_FAMILIES or not hasattr(ops, what):
            allowed = ", ".join(op for op in OP_FAMILIES if hasattr(ops, op))
            raise ValueError(f"op is {what!r}; allowed: {allowed}, or a module or function with its arguments")
        return explain_call(getattr(ops, what), *args, **kwargs)
    if not callable(what):
        raise TypeError(f"what is {what!r:.80} ({type(what).__name__}); allowed: an op's name, a module or a function")
    with record_choices() as choices, torch.no_grad():
        what(*args, **kwargs)
    return Explanations(tuple(choices.values()))

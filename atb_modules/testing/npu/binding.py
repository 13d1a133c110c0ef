"""A call of an operator as its reference takes it: every argument by name, defaults filled in, nothing ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atb_modules.kernels.ascend.socs import SOCS, Soc
from atb_modules.testing.npu.errors import NoReferenceError, OperatorError


@dataclass(frozen=True)
class Call:
    """The operator that runs now, and the SoC whose rules hold."""

    operator: str
    soc: Soc


_CALL: ContextVar[Call | None] = ContextVar("atb_modules_npu_call", default=None)


@contextmanager
def calling(operator: str, soc: Soc) -> Iterator[None]:
    """Inside, ``require`` names ``operator`` and ``current_soc`` is ``soc``."""
    token = _CALL.set(Call(operator, soc))
    try:
        yield
    finally:
        _CALL.reset(token)


def current_soc() -> Soc:
    """The SoC whose rules hold for the call that runs."""
    return _current().soc


def _current() -> Call:
    return _CALL.get() or Call("operator", SOCS["ascend910b1"])


def require(condition: bool, rule: str) -> None:
    """Raise OperatorError with the operator's name and ``rule`` where ``condition`` is false."""
    if not condition:
        call = _current()
        raise OperatorError(f"{call.operator} on {call.soc.name}: {rule}")


def bind(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by the names of its schema."""
    bound = {}
    for place, argument in enumerate(schema.arguments):
        if place < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[place]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def call_reference(function: Callable[..., Any], schema: Any, bound: dict[str, Any]) -> Any:
    """Call a reference with the arguments that it takes.

    Raises:
        NoReferenceError: where the call sets an argument that the reference does not know.
    """
    known = inspect.signature(function).parameters
    for argument in schema.arguments:
        if argument.name in known or _same(bound[argument.name], argument.default_value):
            continue
        raise NoReferenceError(f"{schema.name}: argument {argument.name} is not emulated")
    return function(**{name: value for name, value in bound.items() if name in known})


def _same(value: Any, default: Any) -> bool:
    if value is None or default is None:
        return value is default
    return not isinstance(value, Tensor) and value == default

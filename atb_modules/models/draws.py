"""Modules whose weights are about to be read: memory of its final size, and no random numbers in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)


class WithoutDraws(TorchFunctionMode):
    """Skips ``normal_``: a large tower takes seconds to draw, and on the meta device the first draw imports torch's
    decompositions, which takes seconds and 150 MB.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.init.normal_:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def undrawn(build: Callable[[], M]) -> M:
    """What ``build`` makes on the meta device, with uninitialised memory on the CPU."""
    with WithoutDraws():
        module = build()
    return module.to_empty(device="cpu")

"""without_draws: modules are built without drawing weights that are about to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class without_draws(TorchFunctionMode):
    """Skips `normal_`: weights that are about to be read need no start, and on the meta device the first
    draw imports torch's decompositions, which takes seconds and 150 MB."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.init.normal_:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))

"""Results of a reference against the shapes and dtypes that torch_npu's own Meta kernel says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from atb_modules.testing.npu.errors import OperatorError

#: Meta kernels of torch_npu 2.14.0 that are wrong, each with what is wrong in it.
BROKEN_META = {
    "npu::npu_geglu_grad": "its Python function requires dim and approximate, which the dispatcher leaves at defaults",
}


def has_meta(name: str) -> bool:
    """Whether torch_npu brings a Meta kernel for the operator (overload included in the name)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")


def meta_result(func: Any, args: Any, kwargs: Any) -> Any:
    """What the Meta kernel returns for such arguments."""
    return func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))


def check_against_meta(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
    """Compare every tensor of ``result`` with the Meta kernel's, if there is a sound one.

    Raises:
        OperatorError: where shape or dtype differ, or where the Meta kernel refuses the call.
    """
    if not has_meta(name) or name in BROKEN_META:
        return
    try:
        expected = meta_result(func, args, kwargs)
    except Exception as error:
        raise OperatorError(f"{name}: torch_npu's Meta kernel refuses the call: {error}") from error
    got, want = _as_list(result), _as_list(expected)
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise OperatorError(
                f"{name}: output {place} is {mine.dtype} {tuple(mine.shape)} here and {theirs.dtype} "
                f"{tuple(theirs.shape)} in torch_npu's Meta kernel"
            )


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]

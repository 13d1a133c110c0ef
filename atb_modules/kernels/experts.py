"""What every kernel of a mixture of experts begins with: its pairs of a token and an expert, sorted by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, ends) of the pairs of a token and an expert, experts (tokens, top_k).

    ``order`` puts the pairs expert after expert, each expert's in the order of the tokens; ``inverse`` puts them back;
    ``ends[e]`` is where expert e's pairs end.
    """
    flat = experts.reshape(-1)
    grouped, order = torch.sort(flat, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    numbers = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    return order, inverse, torch.searchsorted(grouped, numbers, right=True)


def has_grouped_products(x: Tensor, *weights: Tensor) -> bool:
    """Whether one launch of ``grouped_mm`` serves all experts: bfloat16 on CUDA, rows of whole 16 bytes."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    return all(w.dtype == x.dtype and w.is_contiguous() and not (w.shape[-1] % 8 or w.shape[-2] % 8) for w in weights)


def vectorising() -> bool:
    """Whether the call stands inside of torch.func.vmap, under which no value can be read."""
    return any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ())

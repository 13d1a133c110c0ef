"""Whether a call of a tower records gradients: only where something in it asks for one."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn


def recording(tower: nn.Module, pixel_values: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context without gradients where neither parameters nor pixels require one.

    A frozen tower in front of a model in training keeps nothing for the backward then, and may work in place.
    """
    needed = pixel_values.requires_grad or any(parameter.requires_grad for parameter in tower.parameters())
    return contextlib.nullcontext() if needed else torch.no_grad()

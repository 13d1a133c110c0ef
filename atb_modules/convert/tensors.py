"""TensorSource: weights by name, read one at a time into memory that is already there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: its shape as torch has it, the dtype that reading gives, and the file it is in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str


class TensorSource(ABC):
    """Weights of one checkpoint. Headers are checked when it is opened, data is read when asked for."""

    infos: dict[str, TensorInfo]

    @abstractmethod
    def read_into(self, name: str, out: Tensor) -> None:
        """Copies tensor `name` into `out` (same shape, any floating dtype), a piece at a time."""

    def close(self) -> None:
        """Lets go of open files, if any are kept between reads."""
        return

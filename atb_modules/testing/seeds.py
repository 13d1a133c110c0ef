"""Fresh random inputs whose seed is printed, so that a failure can be drawn again."""

from __future__ import annotations

import secrets

import torch


def fresh_generator(seed: int | None = None) -> torch.Generator:
    """A CPU generator on a new seed, which is printed (pytest shows it where a test fails), or on ``seed``."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)

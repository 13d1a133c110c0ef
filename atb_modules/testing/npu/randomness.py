"""Random operators of the emulated NPU: drawn on the CPU from the state of the NPU's own generator.

The generator's seed and offset stay the only state, so seeding it, and saving and restoring its state, do what they do
on a device. The numbers are not those that an NPU would draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_STEP = 4  # offsets of a Philox generator come in fours


def random_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The generator that a random operator on ``device`` draws from."""
    if generator is not None:
        return generator
    index = device.index if device.index is not None else torch.npu.current_device()  # type: ignore[attr-defined]
    return torch.npu.default_generators[index]  # type: ignore[attr-defined]


@contextmanager
def drawing(generator: torch.Generator) -> Iterator[None]:
    """Inside, the CPU's default generator draws what follows the state of ``generator``, which moves on."""
    before = torch.random.get_rng_state()
    offset = generator.get_offset()
    torch.random.manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)
    try:
        yield
    finally:
        generator.set_offset(offset + _STEP)
        torch.random.set_rng_state(before)

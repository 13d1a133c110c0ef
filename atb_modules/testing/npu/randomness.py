"""Random operators of the emulated NPU: drawn on the CPU from the state of the NPU's own generator.

The generator's seed and offset stay the only state, so seeding it, and saving and restoring its state, do what they do
on a device. The numbers are not those that an NPU would draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_STEP = 4  # offsets of a Philox generator come in fours
#: what torch_npu's host code moves the offset by for a dropout mask: 10, in fours
_DROPOUT_STEP = 12


def random_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The generator that a random operator on ``device`` draws from; torch_npu takes none of another kind of device."""
    if generator is not None:
        if generator.device.type != "npu":
            raise RuntimeError(f"Expected a 'npu' device type for generator but found '{generator.device.type}'")
        return generator
    module = torch.get_device_module("npu")
    return module.default_generators[module.current_device() if device.index is None else device.index]


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


def next_dropout() -> tuple[int, int]:
    """The seed and the offset of the next dropout mask, as torch_npu takes them from the current device's generator."""
    generator = random_generator(None, torch.device("npu"))
    offset = generator.get_offset()
    generator.set_offset(offset + _DROPOUT_STEP)
    return generator.initial_seed(), offset


def kept(seed: int, offset: int, numels: int, keep_prob: float) -> torch.Tensor:
    """What dropout multiplies ``numels`` elements by: 0, or 1 / keep_prob; the same for the same seed and offset."""
    own = torch.Generator().manual_seed((seed * 1_000_003 + offset) % 2**63)
    return (torch.rand(numels, generator=own) < keep_prob) / keep_prob

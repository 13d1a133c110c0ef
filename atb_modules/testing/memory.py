"""Memory that shows what a kernel does with it: filled with NaN before it is written, and counted at its peak."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside the block, ``torch.empty`` and its kin return NaN (integers: the largest value)."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic  # a module whose attributes are properties
    fill = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        switches.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def peak_memory(function: Callable[[], object]) -> int:
    """The most bytes of CPU tensors that ``function()`` holds at once, beyond those that were there before.

    Read from the profiler's record of torch's allocator; what native code takes for itself is not in it.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        result = function()
    del result
    inner: Any = profiler.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most

"""What peak_memory counts."""

from __future__ import annotations

import torch

from atb_modules.testing import peak_memory


def test_the_most_bytes_held_at_once():
    def function():
        first = torch.zeros(1 << 18)
        second = first + 1
        del first
        return second + 1

    megabyte = 4 << 18
    assert 2 * megabyte <= peak_memory(function) < 2 * megabyte + 10_000
    assert peak_memory(lambda: None) == 0

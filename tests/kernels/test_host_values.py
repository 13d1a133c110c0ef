"""Numbers of tensors on the host: read once, read again when the tensor was written to, trusted where promised."""

from __future__ import annotations

import pytest
import torch

from atb_modules.kernels.ascend.derived import derived
from atb_modules.kernels.host_values import freeze, host_values, remember


def test_writes_are_seen():
    lengths = torch.tensor([3, 4])
    assert host_values(lengths) == (3, 4)
    lengths += 1
    assert host_values(lengths) == (4, 5)
    calls = []
    make = lambda: calls.append(1) or len(calls)  # noqa: E731
    assert [derived(lengths, "x", make), derived(lengths, "x", make), derived(lengths, "y", make)] == [1, 1, 2]
    lengths[0] = 0
    assert derived(lengths, "x", make) == 3


def test_inference_tensors_are_kept_where_somebody_promised():
    with torch.inference_mode():
        lengths = torch.tensor([3, 4])
        assert host_values(lengths) == (3, 4)
        lengths += 1  # these count no writes
        assert host_values(lengths) == (4, 5)
        calls = []
        assert [derived(lengths, "x", lambda: calls.append(1)) for _ in range(2)] and len(calls) == 2
        freeze(lengths)
        assert [derived(lengths, "x", lambda: calls.append(1)) for _ in range(2)] and len(calls) == 3


def test_what_inference_mode_makes_of_a_plain_tensor_serves_training():
    angles = torch.tensor([3.0, 4.0])
    with torch.inference_mode():
        made = derived(angles, "doubled", lambda: 2 * angles)
        assert not made.is_inference() and derived(angles.clone(), "doubled", lambda: 2 * angles) is not made
    x = torch.ones(2, requires_grad=True)
    (x * derived(angles, "doubled", lambda: None)).sum().backward()
    assert x.grad.tolist() == [6.0, 8.0]


def test_what_is_said_must_fit():
    with pytest.raises(ValueError, match=r"values has 3 numbers; tensor has shape \(2,\)"):
        remember(torch.tensor([1, 2]), [1, 2, 3])
    assert host_values(remember(torch.tensor([1, 2]), [1, 2])) == (1, 2)

"""Memory of structured attention beyond its inputs and outputs, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

LENGTH = 32768
PROGRAM = """
import sys, torch
from atb_modules import AttentionSpec
from atb_modules.ops import attention

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

strategy, kind, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {}
if kind == "window":
    spec = AttentionSpec(causal=True, window=(2047, None))
elif kind == "global":
    spec = AttentionSpec(causal=True, window=(2047, None), global_tokens=64)
elif kind == "packed":
    spec = AttentionSpec(causal=True)
    starts = torch.arange(0, length + 1, 1024).int()
    options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
def run(n, **options):
    q, k, v = torch.randn(3, 1, 4, n, 64)
    before = status("VmRSS")
    out, _ = attention(q, k, v, spec, strategy=strategy, **options)
    return before, out
small = {name: starts[:3] for name in options}
run(2048, **small)  # threads, buffers and code are there
before, out = run(length, **options)
print((status("VmHWM") - before) * 1024 - out.numel() * 4)
"""


@pytest.mark.parametrize("kind", ["window", "global", "packed"])
@pytest.mark.parametrize("strategy", ["cpu", "blocked"])
def test_far_less_than_a_bool_mask(strategy, kind):
    """Under 5% of what a bool (n, n) mask of 32,768 tokens would need."""
    command = [sys.executable, "-c", PROGRAM, strategy, kind, str(LENGTH)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert int(printed) < 0.05 * LENGTH**2, f"{int(printed) / 2**20:.1f} MiB"

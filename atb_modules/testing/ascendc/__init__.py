"""Ascend C kernels on a machine without an NPU: their sources, compiled by g++ against an emulation of the API.

The emulation is our own, written from the public documentation, and holds a kernel to the hardware's rules: capacity
of the on-chip memories of each SoC, alignment, bounds, queues, hand-over between pipes and cores, memory that nobody
wrote. What passes here is *emulated*: it has met no device.
"""

from atb_modules.testing.ascendc.build import EmulationError, build_kernels
from atb_modules.testing.ascendc.run import In, InOut, Out, Report, Work, launch

__all__ = ["EmulationError", "In", "InOut", "Out", "Report", "Work", "build_kernels", "launch"]

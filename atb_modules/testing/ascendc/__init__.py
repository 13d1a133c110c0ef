"""Ascend C kernels on a machine without an NPU: their sources, compiled by g++ against an emulation of the API.

The emulation is our own, written from the public documentation, and holds a kernel to the hardware's rules: capacity
of the on-chip memories of each SoC, alignment, bounds, queues, hand-over between pipes and cores, memory that nobody
wrote. What passes here is *emulated*: it has met no device.

Not modelled: time and the caches; the last bits of the vector unit's functions, which are those of the C library here;
that an event of a number may be held by a queue; the cube side of dav-2002 (310P), and of dav-3510 (950) what our
kernels do not use, such as register programs; the libraries above the basic API. A vector instruction that uses the
result of the one before it must stand behind a ``PipeBarrier``, even where the device compiler would put one there
itself.
"""

from atb_modules.testing.ascendc.build import EmulationError, build_kernels
from atb_modules.testing.ascendc.run import In, InOut, Out, Report, Work, launch

__all__ = ["EmulationError", "In", "InOut", "Out", "Report", "Work", "build_kernels", "launch"]

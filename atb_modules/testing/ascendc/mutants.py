"""Faults planted in our own kernels: a copy of their sources with one place changed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from atb_modules.testing.ascendc import build_kernels, kernels
from atb_modules.testing.ascendc.build import ARCH

_OTHER_ENTRIES = re.compile(
    r'(?s)(#ifndef ATB_NO_BFLOAT16\n)?extern "C" __global__ __aicore__ void\s+\w+_(bfloat16|float)\(.*?\n}\n(#endif\n)?'
)


def mutated_sources(directory: Path, name: str, old: str, new: str) -> Path:
    """A copy of the kernels' sources under ``directory`` in which ``old`` of the file ``name`` is ``new``.

    The copies have the kernels of float16 alone: they build in a third of the time.

    Raises:
        ValueError: ``old`` does not occur exactly once: the kernel has changed, and the fault is to be planted anew.
    """
    copy = directory / "ascendc"
    shutil.copytree(kernels.ASCENDC, copy)
    source = copy / name
    text = source.read_text()
    if text.count(old) != 1:
        raise ValueError(f"old occurs {text.count(old)} times in {name}; allowed: once")
    source.write_text(text.replace(old, new))
    for kernel in copy.glob("*.cpp"):
        kernel.write_text(_OTHER_ENTRIES.sub("", kernel.read_text()))
    return copy


def plant(
    directory: Path, kernel: str, faults: Mapping[str, tuple[str, str, str, str]], arch: int = ARCH
) -> dict[str, Path]:
    """``mutated_sources`` for every fault (file, old, new, what the emulation says), with ``kernel`` built."""
    copies = {}
    for number, (fault, (name, old, new, _)) in enumerate(faults.items()):
        copies[fault] = mutated_sources(directory / str(number), name, old, new)
    build_kernels((copy / f"{kernel}.cpp" for copy in copies.values()), arch=arch)
    return copies

"""Compiles Ascend C kernel sources against the emulation, one shared library a source file, kept in the build cache."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from atb_modules.testing.build_cache import cached_build, compiler_version

ROOT = Path(__file__).parent
INCLUDE, SOURCES = ROOT / "include", ROOT / "src"
COMPILER = "g++"
#: No contraction of products and sums: an instruction of the vector unit rounds on its own. -O1: most sources are run
#: about as often as they are compiled.
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-pthread")

_ENTRY = re.compile(r"__global__\s+__aicore__\s+void\s+(\w+)\s*\(")
_TYPE = re.compile(r"KERNEL_TASK_TYPE_DEFAULT\s*\(\s*(\w+)\s*\)")
#: the generation of 910B and 910_93, as the device compiler's macro __NPU_ARCH__ names it
ARCH = 2201


class EmulationError(RuntimeError):
    """A kernel broke a rule of the hardware; the text is the rule."""


@cache
def options() -> tuple[str, ...]:
    """With conversions of float16 in hardware where this machine has them."""
    if platform.machine() in ("x86_64", "AMD64"):
        info = Path("/proc/cpuinfo")
        if info.is_file() and " f16c" in info.read_text(errors="replace"):
            return (*OPTIONS, "-mf16c")
    return OPTIONS


def read_sources(paths: Iterable[Path]) -> list[bytes]:
    return [path.name.encode() + b"\0" + path.read_bytes() for path in sorted(paths)]


@cache
def emulation_parts() -> tuple[bytes | str, ...]:
    files = [*INCLUDE.rglob("*.h"), *SOURCES.glob("*.cpp")]
    return (*read_sources(files), compiler_version(COMPILER), " ".join(options()))


def run_compiler(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    rules = re.findall(r"static assertion failed: (.*)", done.stderr)
    raise EmulationError(f"{what} does not compile: {'; '.join(dict.fromkeys(rules)) or done.stderr[-4000:]}")


@cache
def emulation_objects() -> Path:
    """The directory with the object files of the emulation itself."""

    def build(directory: Path) -> None:
        for source in sorted(SOURCES.glob("*.cpp")):
            target = directory / f"{source.stem}.o"
            command = [COMPILER, *options(), f"-I{INCLUDE}", "-c", str(source), "-o", str(target)]
            run_compiler(command, f"the emulation's {source.name}")

    return cached_build("ascendc-emulation", emulation_parts(), build)


def kernel_entries(text: str) -> dict[str, str]:
    """Name and declared type (``KERNEL_TASK_TYPE_DEFAULT``, default vector) of every kernel in a source."""
    found = list(_ENTRY.finditer(text))
    entries = {}
    for match, after in zip(found, [*found[1:], None], strict=True):
        declared = _TYPE.search(text, match.end(), after.start() if after else len(text))
        entries[match.group(1)] = declared.group(1) if declared else "KERNEL_TYPE_AIV_ONLY"
    return entries


def kernel_headers(*roots: Path) -> list[Path]:
    """The headers that a kernel may include; ``launch.h`` belongs to the binding."""
    return [path for root in roots for path in root.rglob("*.h") if path.name != "launch.h"]


def arch_option(text: str, arch: int) -> tuple[str, ...]:
    """``__NPU_ARCH__`` for sources with a cube side; vector kernels are the same on every generation.

    With what the CMake file gives to kernels of dav-3510, by which they reach L1 from the unified buffer.
    """
    if "_AIC_" not in text:
        return ()
    return (f"-D__NPU_ARCH__={arch}", *(("-DENABLE_CV_COMM_VIA_SSBUF=true",) if arch == 3510 else ()))


def write_unit(source: Path, directory: Path) -> Path:
    """A source that includes a kernel source as it is and registers its kernels with the emulation."""
    entries = kernel_entries(source.read_text())
    lines = [f'#include "{source.resolve()}"', '#include "emulation/entry.h"']
    lines += [f"ATB_EMULATED_KERNEL({name}, {kind})" for name, kind in entries.items()]
    unit = directory / f"{source.stem}_unit.cpp"
    unit.write_text("\n".join(lines) + "\n")
    return unit


def build_kernel(source: Path, *, include: Sequence[Path] = (), arch: int = ARCH) -> Path:
    """The shared library with the kernels of ``source`` on the emulation; built once for the same text.

    Args:
        source: a kernel source, as the device compiler takes it.
        include: more directories to look for headers; that of the source is one.
        arch: the generation of the SoC, for sources with a cube side.

    Raises:
        EmulationError: it does not compile; where an instruction has no such form, the text says so.
    """
    source = Path(source)
    text = source.read_text()
    if not kernel_entries(text):
        raise ValueError(f'source {source} has no kernel (extern "C" __global__ __aicore__ void name(...))')
    headers = kernel_headers(source.parent, *include)
    objects, defined = emulation_objects(), arch_option(text, arch)

    def build(directory: Path) -> None:
        unit = write_unit(source, directory)
        directories = [f"-I{path}" for path in (INCLUDE, source.parent, *include)]
        linked = [str(path) for path in sorted(objects.glob("*.o"))]
        library = str(directory / "kernel.so")
        command = [COMPILER, *options(), *defined, *directories, "-shared", str(unit), *linked, "-o", library]
        run_compiler(command, source.name)

    parts: list[str | bytes] = [text, *read_sources(headers), *emulation_parts(), *defined]
    return cached_build(f"ascendc-{source.stem}", parts, build) / "kernel.so"


def build_host(source: Path) -> Path:
    """The shared library of a host source, such as the tilings: plain C++ behind ``extern "C"``."""
    source = Path(source)

    def build(directory: Path) -> None:
        run_compiler(
            [COMPILER, "-std=c++17", "-O1", "-fPIC", "-shared", str(source), "-o", str(directory / "host.so")],
            source.name,
        )

    parts: list[str | bytes] = [*read_sources([source, *source.parent.rglob("*.h")]), compiler_version(COMPILER)]
    return cached_build(f"ascendc-{source.stem}", parts, build) / "host.so"


def build_kernels(
    sources: Iterable[Path], *, include: Sequence[Path] = (), arch: int = ARCH, workers: int = 2
) -> list[Path]:
    """``build_kernel`` of several sources, ``workers`` at a time."""
    emulation_objects()
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda source: build_kernel(source, include=include, arch=arch), sources))

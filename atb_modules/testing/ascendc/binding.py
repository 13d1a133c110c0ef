"""Builds the torch binding of our Ascend C kernels on the emulation, for tests on an emulated NPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from atb_modules.testing.ascendc.build import (
    ARCH,
    COMPILER,
    INCLUDE,
    arch_option,
    emulation_objects,
    emulation_parts,
    kernel_headers,
    options,
    read_sources,
    run_compiler,
    write_unit,
)
from atb_modules.testing.ascendc.kernels import ASCENDC
from atb_modules.testing.build_cache import cached_build


def kernel_object(source: Path, arch: int) -> Path:
    """The object file of one kernel source on the emulation of a generation."""
    headers = kernel_headers(source.parent)
    defined = arch_option(source.read_text(), arch)

    def build(directory: Path) -> None:
        unit = write_unit(source, directory)
        command = [COMPILER, *options(), *defined, f"-I{INCLUDE}", f"-I{source.parent}", "-c", str(unit)]
        run_compiler([*command, "-o", str(directory / "kernel.o")], source.name)

    parts = [source.read_text(), *read_sources(headers), *emulation_parts(), *defined, "object"]
    return cached_build(f"ascendc-object-{source.stem}", parts, build) / "kernel.o"


def binding_object(source: Path, torch_npu: Path) -> Path:
    """The object file of one source of the binding, against the headers of torch and of a torch_npu wheel."""
    torch_root = Path(torch.__file__).parent
    includes = [
        ASCENDC, torch_npu / "include", torch_npu / "include" / "third_party" / "acl" / "inc", torch_root / "include",
        torch_root / "include" / "torch" / "csrc" / "api" / "include",
    ]  # fmt: skip

    def build(directory: Path) -> None:
        command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-DATB_HOST_KERNELS", "-D_GLIBCXX_USE_CXX11_ABI=1", "-w"]
        command += [f"-I{path}" for path in includes]
        run_compiler([*command, "-c", str(source), "-o", str(directory / "binding.o")], source.name)

    headers = [*ASCENDC.glob("*.h"), *(ASCENDC / "tiling").glob("*.h")]
    parts = [source.read_text(), *read_sources(headers), *emulation_parts(), torch.__version__, str(torch_npu)]
    return cached_build(f"ascendc-{source.stem}", parts, build) / "binding.o"


def build_binding(torch_npu: Path, arch: int = ARCH) -> Path:
    """The shared library with all ops ``atb_modules::ascend_*`` whose kernels run on the emulation.

    Load it with ``torch.ops.load_library`` after torch_npu. Set ``TASK_QUEUE_ENABLE=0`` before torch_npu is imported,
    so that a fault of the emulation is raised where the op was called.

    Args:
        torch_npu: the unpacked package ``torch_npu`` of a wheel, for its headers.
        arch: the generation that kernels with a cube side are built for.
    """
    bindings = sorted(ASCENDC.glob("binding*.cpp"))
    kernels = [path for path in sorted(ASCENDC.glob("*.cpp")) if path not in bindings]
    emulation_objects()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(binding_object, path, torch_npu) for path in bindings]
        jobs += [pool.submit(kernel_object, path, arch) for path in kernels]
        objects = [job.result() for job in jobs]
    objects += sorted(emulation_objects().glob("*.o"))

    def build(directory: Path) -> None:
        # The libraries are loaded already, by torch and torch_npu; what CANN's stand-ins define is global.
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", f"-L{torch_npu / 'lib'}", "-Wl,--no-as-needed"]
        libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_npu", "-Wl,--allow-shlib-undefined"]
        linked = [str(path) for path in objects]
        output = ["-pthread", "-o", str(directory / "binding.so")]
        run_compiler([COMPILER, "-shared", *linked, *libraries, *output], "the binding")

    parts = [*map(str, objects), str(torch_npu), torch.__version__, torch.__file__]
    return cached_build("ascendc-binding-library", parts, build) / "binding.so"

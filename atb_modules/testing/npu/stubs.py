"""Builds the libraries that stand in for CANN: one library with all answers, and a name for each part of CANN.

``native/runtime.cpp`` answers what torch_npu needs to load and to keep its books; every other symbol that the wheel
needs becomes a function that fails and names itself. ``libopapi.so`` holds an entry for each operator. The result is
kept in the build cache; the sources, the wheel and the compiler are its key.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from atb_modules.testing.build_cache import cached_build, compiler_version
from atb_modules.testing.npu.errors import BootError
from atb_modules.testing.npu.wheel import CANN, missing_symbols, operator_names, symbols, wheel_libraries

NATIVE = Path(__file__).parent / "native"
RUNTIME = "libemulated_npu.so"
OPERATORS = "libopapi.so"
ALLOCATOR_KEYS = "liballocator_keys.so"
_FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared", "-w")


def build_stubs(directory: Path, torch_libraries: Path) -> Path:
    """The directory with the libraries for the wheel in ``directory`` and the torch in ``torch_libraries``.

    Raises:
        BootError: without a C++ compiler or binutils, or where the compiler fails.
    """
    try:
        compiler = compiler_version()
    except RuntimeError as error:
        raise BootError(f"{error}; install g++ and binutils") from error
    sources = [path.read_bytes() for path in sorted(NATIVE.glob("*.cpp"))]
    stamps = [_stamp(path) for path in [*wheel_libraries(directory), torch_libraries / "libtorch_cpu.so"]]
    parts: list[str | bytes] = [Path(__file__).read_bytes(), *sources, *stamps, compiler]
    return cached_build("npu_stubs", parts, lambda target: _build(target, directory, torch_libraries))


def _build(target: Path, directory: Path, torch_libraries: Path) -> None:
    missing = missing_symbols(directory, torch_libraries)
    operators = operator_names(directory)
    operator_source = _operators_source(operators)
    operator_file = target / "operators.cpp"
    operator_file.write_text(operator_source)
    rest = _rest_source(missing, target)
    rest_file = target / "rest.cpp"
    rest_file.write_text(rest)
    _compile(target / RUNTIME, NATIVE / "runtime.cpp", rest_file)
    beside = ("-L", str(target), f"-l:{RUNTIME}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN")
    _compile(target / OPERATORS, NATIVE / "opapi.cpp", operator_file, options=beside)
    empty = target / "empty.cpp"
    empty.write_text("")
    for name in CANN:
        _compile(target / name, empty, options=("-Wl,--no-as-needed", *beside))
    torch = ("-L", str(torch_libraries), "-lc10", f"-Wl,-rpath,{torch_libraries}")
    _compile(target / ALLOCATOR_KEYS, NATIVE / "allocator_keys.cpp", options=torch)


def _rest_source(missing: list[str], target: Path) -> str:
    """A function for each symbol that ``runtime.cpp`` does not answer: it fails and leaves its name."""
    trial = target / "answers.so"
    _compile(trial, NATIVE / "runtime.cpp")
    answered = set(symbols(trial, defined=True))
    trial.unlink()
    lines = ['extern "C" {', "long emulated_npu_fail(const char *);"]
    lines += [f'long {name}() {{ return emulated_npu_fail("{name}"); }}' for name in missing if name not in answered]
    return "\n".join([*lines, "}", ""])


def _operators_source(operators: list[str]) -> str:
    lines = ['extern "C" {', "int emulated_opapi_note(const char *);"]
    for name in operators:
        lines.append(f"int {name}() {{ return 0; }}")
        lines.append(f'int {name}GetWorkspaceSize() {{ return emulated_opapi_note("{name}"); }}')
    return "\n".join([*lines, "}", ""])


def _compile(output: Path, *inputs: Path, options: tuple[str, ...] = ()) -> None:
    command = ["g++", *_FLAGS, f"-Wl,-soname,{output.name}", "-o", str(output), *map(str, inputs), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BootError(f"the stub {output.name} does not compile: {done.stderr.strip()[:2000]}")


def _stamp(path: Path) -> str:
    """What tells two versions of a large library apart without reading it."""
    status = os.stat(path)
    return f"{path}:{status.st_size}:{status.st_mtime_ns}"

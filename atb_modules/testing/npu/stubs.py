"""Builds the libraries that stand in for CANN: one library with all answers, and an empty one for each part's name.

``native/`` answers what torch_npu needs to load and to keep its books, and records operators; every other symbol that
the wheel needs becomes a function that fails and names itself. The result is kept in the build cache; the sources, the
wheel and the compiler are its key.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from atb_modules.testing.build_cache import cached_build, compiler_version
from atb_modules.testing.npu.errors import BootError
from atb_modules.testing.npu.wheel import CANN, missing_symbols, operator_names, symbols, wheel_libraries

NATIVE = Path(__file__).parent / "native"
RUNTIME = "libemulated_npu.so"
ALLOCATOR_KEYS = "liballocator_keys.so"
#: atb::CreateOperation<atb::infer::PagedAttentionParam>(...), mangled
_ATB_OPERATION = re.compile(r"_ZN3atb15CreateOperationINS_5infer\d+(\w+?)ParamEEE")
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
    sources = [path.read_bytes() for path in sorted(NATIVE.iterdir())]
    stamps = [_stamp(path) for path in [*wheel_libraries(directory), torch_libraries / "libtorch_cpu.so"]]
    parts: list[str | bytes] = [Path(__file__).read_bytes(), *sources, *stamps, compiler]
    return cached_build("npu_stubs", parts, lambda target: _build(target, directory, torch_libraries))


def _build(target: Path, directory: Path, torch_libraries: Path) -> None:
    answers = [path for path in sorted(NATIVE.glob("*.cpp")) if path.name != "allocator_keys.cpp"]
    trial = target / "answers.so"
    _compile(trial, *answers)
    answered = set(symbols(trial, defined=True))
    trial.unlink()
    generated = target / "generated.cpp"
    missing = [name for name in missing_symbols(directory, torch_libraries) if name not in answered]
    generated.write_text(_generated(missing, operator_names(directory)))
    _compile(target / RUNTIME, *answers, generated)
    empty = target / "empty.cpp"
    empty.write_text("")
    beside = ("-Wl,--no-as-needed", "-L", str(target), f"-l:{RUNTIME}", "-Wl,-rpath,$ORIGIN")
    for name in CANN:
        _compile(target / name, empty, options=beside)
    torch = ("-L", str(torch_libraries), "-lc10", f"-Wl,-rpath,{torch_libraries}")
    _compile(target / ALLOCATOR_KEYS, NATIVE / "allocator_keys.cpp", options=torch)


def _generated(missing: list[str], operators: list[str]) -> str:
    """Source of the functions without a written answer: failures that name themselves, operators that are recorded."""
    lines = [
        'extern "C" {',
        "long emulated_npu_fail(const char *);",
        "int emulated_operator_note(const char *);",
        "int emulated_atb_create(const char *, void **);",
    ]
    for name in missing:
        operation = _ATB_OPERATION.match(name)
        if operation:
            made = f'emulated_atb_create("atb:{operation.group(1)}", operation)'
            lines.append(f"int {name}(const void *, void **operation) {{ return {made}; }}")
        else:
            lines.append(f'long {name}() {{ return emulated_npu_fail("{name}"); }}')
    for name in operators:
        lines.append(f"int {name}() {{ return 0; }}")
        lines.append(f'int {name}GetWorkspaceSize() {{ return emulated_operator_note("{name}"); }}')
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

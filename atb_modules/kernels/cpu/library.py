"""Finds, loads and describes the native CPU library (a plain C interface, called through ctypes)."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from . import structs

_NAMES = ("libatb_cpu.so", "atb_cpu.so", "libatb_cpu.dylib")
_ISAS = ("baseline", "avx2", "avx512")
_ABI_VERSION = 6
NOT_BUILT = "native library not built"


def _candidates() -> list[Path]:
    # An editable installation keeps the sources here and installs the library into site-packages.
    places = [Path(__file__).parent]
    places += [Path(sysconfig.get_path(key), "atb_modules", "kernels", "cpu") for key in ("platlib", "purelib")]
    return [place / name for place in places for name in _NAMES]


def _declare(library: ctypes.CDLL) -> None:
    for name, struct in structs.KERNELS.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.POINTER(struct)]
        function.restype = ctypes.c_int64 if name == "atb_decode_workspace" else None
    for name in (
        "atb_abi_version",
        "atb_best_isa",
        "atb_current_isa",
        "atb_select_isa",
        "atb_has_bf16_units",
    ):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_int32] if name == "atb_select_isa" else []
        function.restype = ctypes.c_int32


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    path = next((path for path in _candidates() if path.is_file()), None)
    if path is None:
        return None, NOT_BUILT
    # torch is imported above, so its OpenMP runtime is already in the process and the library binds to it.
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"native library at {path} cannot be loaded: {error}"
    library.atb_abi_version.restype = ctypes.c_int32
    version = library.atb_abi_version()
    if version != _ABI_VERSION:
        return (
            None,
            f"native library at {path} has interface version {version}, this package needs {_ABI_VERSION}",
        )
    _declare(library)
    return library, None


def unavailable_reason() -> str | None:
    """Why the native kernels cannot be called ("native library not built"), or None when they can."""
    return _load()[1]


def get() -> ctypes.CDLL:
    """The loaded library; raises RuntimeError with the reason when there is none."""
    library, reason = _load()
    if library is None:
        raise RuntimeError(f"atb_modules CPU kernels: {reason}")
    return library


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this library was built for and this processor runs, plainest first."""
    library, _ = _load()
    if library is None:
        return ()
    current = library.atb_current_isa()
    found = tuple(name for index, name in enumerate(_ISAS) if library.atb_select_isa(index) == 0)
    library.atb_select_isa(current)
    return found


def current_isa() -> str:
    """The instruction set in use: "baseline", "avx2" or "avx512"."""
    return _ISAS[get().atb_current_isa()]


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Forces an instruction set inside the block, for tests and measurements (process-wide, not per thread).

    Raises:
        ValueError: the name is unknown, or this processor or this build has no such instruction set.
    """
    if name not in available_isas():
        raise ValueError(f"isa must be one of {available_isas()} on this machine, got {name!r}")
    library = get()
    before = library.atb_current_isa()
    library.atb_select_isa(_ISAS.index(name))
    try:
        yield
    finally:
        library.atb_select_isa(before)


@cache
def cpu_has_bf16_units() -> bool:
    """Whether the processor multiplies bfloat16 natively (AVX-512 BF16 or AMX); False without the library."""
    library, _ = _load()
    return library is not None and bool(library.atb_has_bf16_units())


def dtype_code(name: str, dtype: torch.dtype) -> int:
    """The C interface's number of a dtype; `name` is the argument that an error names."""
    code = structs.DTYPES.get(dtype)
    if code is None:
        raise TypeError(f"{name} must be float32, bfloat16 or float16 for the CPU kernels, got {dtype}")
    return code


def page_dtype_code(name: str, dtype: torch.dtype) -> int:
    """The same for pages of keys and values, which may be int8 too."""
    return structs.INT8_PAGES if dtype == torch.int8 else dtype_code(name, dtype)

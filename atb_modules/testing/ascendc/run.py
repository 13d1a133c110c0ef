"""Launches kernels on the emulation, over CPU tensors, and reports what they did."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np
from torch import Tensor

from atb_modules.kernels.ascend.socs import Soc, find_soc
from atb_modules.testing.ascendc.build import EmulationError, build_kernel

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
PLACES = ("UB", "L1", "L0A", "L0B", "L0C")
POSITIONS = ("GM", "A1", "A2", "B1", "B2", "C1", "C2", "CO1", "CO2", "VECIN", "VECOUT", "VECCALC", "LCM")
#: one instruction of the trace; ``place`` indexes PLACES (5: none), ``region`` the tensors of the launch (-1: none)
TRACE = np.dtype(
    [
        ("core", "i4"), ("pipe", "i4"), ("place", "i4"), ("region", "i4"), ("offset", "i8"), ("bytes", "i8"),
        ("region_offset", "i8"), ("op", "S32"),
    ]
)  # fmt: skip
_MAP = np.dtype(
    [
        ("core", "i4"), ("place", "i4"), ("position", "i4"), ("queue", "i4"), ("buffer", "i4"), ("_", "i4"),
        ("offset", "i8"), ("bytes", "i8"),
    ]
)  # fmt: skip


class _Access(IntEnum):
    IN, OUT, INOUT, WORK = range(4)


@dataclass(frozen=True, eq=False)
class Argument:
    """A tensor in global memory, and what the kernel may do with it."""

    tensor: Tensor
    access: _Access

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise TypeError(f"tensor is {type(self.tensor).__name__}; allowed: a torch.Tensor")
        strides = self.tensor.stride()
        dense_rows = (
            self.tensor.dim() == 0 or self.tensor.numel() == 0 or strides[-1] == 1 or self.tensor.shape[-1] == 1
        )
        if self.tensor.device.type != "cpu" or not dense_rows or list(strides) != sorted(strides, reverse=True):
            raise ValueError(
                f"tensor is on {self.tensor.device} with strides {strides}; allowed: on the CPU, dense rows in order"
            )

    @property
    def span(self) -> int:
        """Bytes from its first element to behind its last: the gaps of a view are part of what may be touched."""
        if self.tensor.numel() == 0:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return (last + 1) * self.tensor.element_size()


def In(tensor: Tensor) -> Argument:
    """An input: to write it is an error."""
    return Argument(tensor, _Access.IN)


def Out(tensor: Tensor) -> Argument:
    """An output, poisoned with NaN before the launch: to read an element before it is written is an error."""
    return Argument(tensor, _Access.OUT)


def InOut(tensor: Tensor) -> Argument:
    """Read and written, as it comes."""
    return Argument(tensor, _Access.INOUT)


def Work(tensor: Tensor) -> Argument:
    """A workspace: as an output, and of no interest afterwards."""
    return Argument(tensor, _Access.WORK)


class _Limits(ctypes.Structure):
    _fields_ = [("capacity", ctypes.c_int64 * 5)] + [
        (name, ctypes.c_int32) for name in ("cube_cores", "vector_cores", "bfloat16", "arch")
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("element", ctypes.c_int32), ("access", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """Bytes that a launch moved between a tensor and the cores, and how many elements were never written.

    ``unwritten`` is 0 for an input. In an output it counts elements that still hold the poison: what the kernel forgot,
    or the gaps of a view. In an ``InOut`` or a ``Work`` it is what the kernel had no reason to write.
    """

    read: int
    written: int
    unwritten: int


@dataclass(frozen=True)
class CoreUse:
    """One core of a launch: its kind, its block, and the peak bytes of each on-chip memory."""

    cube: bool
    block: int
    peak: dict[str, int]


@dataclass(frozen=True)
class BufferRow:
    """A buffer in the map of an on-chip memory: ``queue`` is None for a TBuf."""

    core: int
    place: str
    position: str
    queue: int | None
    buffer: int
    offset: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Report:
    """What an emulated launch did.

    Args:
        soc: the SoC it was held to.
        blocks: how many blocks it was launched with.
        tensors: the traffic of each tensor argument, in order.
        cores: peaks of every core.
        trace: the instructions in the order in which they were issued, a structured array of dtype ``TRACE``.
        buffers: the map of the on-chip memories.
    """

    soc: Soc
    blocks: int
    tensors: tuple[Traffic, ...]
    cores: tuple[CoreUse, ...]
    trace: np.ndarray
    buffers: tuple[BufferRow, ...]

    @property
    def bytes_read(self) -> int:
        return sum(traffic.read for traffic in self.tensors)

    @property
    def bytes_written(self) -> int:
        return sum(traffic.written for traffic in self.tensors)

    @property
    def bytes_moved(self) -> int:
        """Bytes between global memory and the cores, both ways."""
        return self.bytes_read + self.bytes_written

    def peak(self, place: str) -> int:
        """The largest use of an on-chip memory ("UB", "L1", "L0A", "L0B", "L0C") by one core."""
        return max(core.peak[place] for core in self.cores)

    def instructions(self, core: int = 0, pipe: str | None = None, op: str | None = None) -> np.ndarray:
        """The rows of the trace of one core, of a pipe and of an instruction where they are given; ``issue`` first.

        Returns:
            indices into ``trace``, ascending: their order is the order of issue.
        """
        keep = self.trace["core"] == core
        if pipe is not None:
            keep &= self.trace["pipe"] == PIPES.index(pipe)
        if op is not None:
            keep &= self.trace["op"] == op.encode()
        return np.flatnonzero(keep)

    def listing(self, core: int = 0, start: int = 0, stop: int | None = None) -> str:
        """Instructions ``start`` to ``stop`` of a core as text: number, pipe, instruction, place, tensor."""
        lines = []
        for index in self.instructions(core)[start:stop]:
            row = self.trace[index]
            line = f"{index:6d} {PIPES[row['pipe']]:<5} {row['op'].decode():<18}"
            if row["place"] < len(PLACES) and row["bytes"]:
                line += f" {PLACES[row['place']]}[{row['offset']} : {row['offset'] + row['bytes']}]"
            if row["region"] >= 0:
                line += f" tensor {row['region']} at {row['region_offset']}"
            lines.append(line.rstrip())
        return "\n".join(lines)


@cache
def _library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.atb_emulation_launch.restype = ctypes.c_void_p
    library.atb_emulation_error.restype = ctypes.c_char_p
    for name in ("cores", "trace", "map"):
        getattr(library, f"atb_emulation_{name}").restype = ctypes.c_int64
    return library


def limits_of(soc: Soc) -> _Limits:
    """The numbers of a SoC that the emulation enforces; the cube side is modelled for dav-2201 and dav-3510."""
    capacity = (ctypes.c_int64 * 5)(soc.ub, soc.l1, soc.l0a, soc.l0b, soc.l0c)
    return _Limits(capacity, soc.cube_cores, soc.vector_cores, soc.bfloat16, soc.npu_arch)


def launch(
    source: Path | str,
    kernel: str,
    arguments: Sequence[Argument | ctypes.Structure | ctypes.Array | ctypes._SimpleCData | None],
    *,
    soc: str | Soc = "ascend910b1",
    blocks: int = 1,
    include: Sequence[Path] = (),
    trace: bool = True,
) -> Report:
    """Run one kernel of a source on the emulation.

    Args:
        source: the kernel source.
        kernel: the name of the entry.
        arguments: in the kernel's order: ``In``, ``Out``, ``InOut`` or ``Work`` for a pointer to global memory, None
            for a null pointer, a ctypes structure or scalar for anything by value.
        soc: whose limits apply.
        blocks: the block dimension; at most the cores of the SoC.
        include: more directories for headers.
        trace: whether the report lists the instructions.

    Raises:
        EmulationError: a rule of the hardware is broken; the text says which, and where.
    """
    soc = soc if isinstance(soc, Soc) else find_soc(soc)
    library = _library(build_kernel(Path(source), include=include, arch=soc.npu_arch))
    tensors, packed, sizes = [], bytearray(), []
    for index, argument in enumerate(arguments):
        if isinstance(argument, Argument):
            tensor = argument.tensor
            size = argument.span
            if argument.access in (_Access.OUT, _Access.WORK) and size:
                ctypes.memset(tensor.data_ptr(), 0xFF, size)
            tensors.append(_Tensor(tensor.data_ptr(), size, tensor.element_size(), argument.access))
            data = bytes(ctypes.c_void_p(tensor.data_ptr() if size else None))
        elif argument is None:
            data = bytes(8)
        elif isinstance(argument, (ctypes.Structure, ctypes.Array, ctypes._SimpleCData)):
            data = bytes(argument)
        else:
            raise TypeError(
                f"arguments[{index}] is {type(argument).__name__}; allowed: In, Out, InOut, Work, None, a ctypes value"
            )
        packed += data
        sizes.append(len(data))
    limits = limits_of(soc)
    handle = ctypes.c_void_p(
        library.atb_emulation_launch(
            kernel.encode(), ctypes.byref(limits), ctypes.c_int64(blocks), ctypes.c_int32(trace),
            (_Tensor * len(tensors))(*tensors), len(tensors), bytes(packed), (ctypes.c_int64 * len(sizes))(*sizes),
            len(sizes),
        )
    )  # fmt: skip
    try:
        error = library.atb_emulation_error(handle).decode()
        if error:
            raise EmulationError(f"{kernel} on {soc.name}: {error}")
        return _read_report(library, handle, soc, blocks, len(tensors))
    finally:
        library.atb_emulation_free(handle)


def _read_report(library: ctypes.CDLL, handle: ctypes.c_void_p, soc: Soc, blocks: int, tensors: int) -> Report:
    numbers = (ctypes.c_int64 * 7)()
    traffic = []
    for index in range(tensors):
        library.atb_emulation_tensor(handle, index, numbers)
        traffic.append(Traffic(*numbers[:3]))
    cores = []
    for index in range(library.atb_emulation_cores(handle)):
        library.atb_emulation_core(handle, ctypes.c_int64(index), numbers)
        cores.append(CoreUse(bool(numbers[0]), numbers[1], dict(zip(PLACES, numbers[2:7], strict=True))))
    rows = [
        BufferRow(
            int(row["core"]), PLACES[row["place"]], POSITIONS[row["position"]],
            None if row["queue"] < 0 else int(row["queue"]), int(row["buffer"]), int(row["offset"]), int(row["bytes"]),
        )
        for row in _copy_rows(library.atb_emulation_map, handle, _MAP)
    ]  # fmt: skip
    trace = _copy_rows(library.atb_emulation_trace, handle, TRACE)
    return Report(soc, blocks, tuple(traffic), tuple(cores), trace, tuple(rows))


def _copy_rows(function: Callable[..., int], handle: ctypes.c_void_p, dtype: np.dtype) -> np.ndarray:
    start = ctypes.c_void_p()
    count = function(handle, ctypes.byref(start))
    return np.frombuffer(ctypes.string_at(start, count * dtype.itemsize), dtype).copy() if count else np.empty(0, dtype)

"""The dry run: which operators torch_npu's own host code would launch for a call, on each SoC.

The C++ host code of torch_npu runs for real: its checks, its allocation of outputs, its choice of an operator, its
layout conversions. The operators themselves only write down their names and tensors, so outputs are garbage. What it
refuses here it refuses on a device; what it accepts may still be refused by CANN.

    with dry_run() as launches:
        torch_npu.npu_rms_norm(x, weight)
    launches[0].name                # "aclnnRmsNorm"

torch_npu reads the SoC once a process, so ``dry_run_on`` starts one for each SoC.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atb_modules.testing.npu.boot import booted
from atb_modules.testing.npu.errors import BootError

#: aclDataType of the public interface -> its name here
_DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 9: "int64", 10: "uint64",
    11: "float64", 12: "bool", 27: "bfloat16", 29: "int4",
}  # fmt: skip


_HOST = "host:"


@dataclass(frozen=True)
class Launch:
    """One operator that would be launched, with (dtype, shape) of the tensors handed to it, outputs included; or a wait
    of the host for the device, named "host:" and the function of the runtime.
    """

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class TensorSpec:
    """An argument of a ``DryCall``: a tensor on the device (or on the host) of zeros, or of ``fill``."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float16
    fill: float = 0.0
    host: bool = False

    def build(self) -> torch.Tensor:
        tensor = torch.full(self.shape, self.fill, dtype=self.dtype)
        return tensor if self.host else tensor.to("npu:0")


@dataclass(frozen=True)
class DryCall:
    """A call for another process: operator ("npu::npu_rms_norm", with ".overload"), arguments with ``TensorSpec``."""

    operator: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DryResult:
    """What came of a ``DryCall``: its launches, or the error of torch_npu's host code."""

    launches: tuple[Launch, ...] = ()
    error: str = ""

    @property
    def accepted(self) -> bool:
        return not self.error

    @property
    def names(self) -> tuple[str, ...]:
        """The operators, in order."""
        return tuple(launch.name for launch in self.launches if not launch.name.startswith(_HOST))

    @property
    def host_waits(self) -> tuple[str, ...]:
        """The calls by which the host waited for the device, in order."""
        return tuple(launch.name.removeprefix(_HOST) for launch in self.launches if launch.name.startswith(_HOST))


@contextmanager
def dry_run() -> Iterator[list[Launch]]:
    """Inside, operators on ``npu:`` run their host code alone; the list is filled when the block ends.

    Raises:
        BootError: where nothing is booted.
    """
    here = booted()
    if here is None:
        raise BootError("dry_run needs boot() first")
    launches: list[Launch] = []
    here.runtime.emulated_operators_record(1)
    try:
        yield launches
    finally:
        lines = here.runtime.emulated_operators_lines().decode().splitlines()
        here.runtime.emulated_operators_record(0)
        launches.extend(map(_parse, lines))


def dry_run_on(soc: str, calls: Sequence[DryCall], torch_npu_dir: str | Path | None = None) -> list[DryResult]:
    """The results of ``calls`` in a fresh process that believes in ``soc``.

    Raises:
        BootError: where that process does not boot, with what it said.
    """
    request = pickle.dumps((soc, list(calls), torch_npu_dir))
    command = [sys.executable, "-m", "atb_modules.testing.npu.host_code_process"]
    done = subprocess.run(command, input=request, capture_output=True, env=os.environ)
    if done.returncode or not done.stdout:
        raise BootError(f"the dry run on {soc} failed: {done.stderr.decode(errors='replace')[-2000:]}")
    return pickle.loads(done.stdout)


def _parse(line: str) -> Launch:
    name, *tensors = line.split()
    described = []
    for tensor in tensors:
        dtype, sizes = tensor.split(":")
        shape = tuple(int(size) for size in sizes.split(",") if size)
        described.append((_DTYPES.get(int(dtype), f"dtype {dtype}"), shape))
    if name.startswith("aclnn"):
        described.reverse()  # descriptors are made from the last argument to the first
    return Launch(name, tuple(described))

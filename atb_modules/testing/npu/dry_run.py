"""The dry run: which operators torch_npu's own host code would launch for a call, on each SoC.

The C++ host code of torch_npu runs for real: its checks, its allocation of outputs, its choice of an operator, its layout
conversions. The operators themselves only write down their names and tensors, so outputs are garbage. What it refuses
here it refuses on a device; what it accepts may still be refused by CANN.

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
from torch.utils._pytree import tree_map

from atb_modules.testing.npu.boot import boot, booted
from atb_modules.testing.npu.errors import BootError

#: aclDataType of the public interface -> its name here
_DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 9: "int64", 10: "uint64",
    11: "float64", 12: "bool", 27: "bfloat16", 29: "int4",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One operator that would be launched, with (dtype, shape) of the tensors handed to it, outputs included."""

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
        return tuple(launch.name for launch in self.launches)


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
    here.operators.emulated_opapi_record(1)
    try:
        yield launches
    finally:
        lines = here.operators.emulated_opapi_lines().decode().splitlines()
        here.operators.emulated_opapi_record(0)
        launches.extend(map(_parse, lines))


def dry_run_on(soc: str, calls: Sequence[DryCall], torch_npu_dir: str | Path | None = None) -> list[DryResult]:
    """The results of ``calls`` in a fresh process that believes in ``soc``.

    Raises:
        BootError: where that process does not boot, with what it said.
    """
    request = pickle.dumps((soc, list(calls), torch_npu_dir))
    command = [sys.executable, "-m", "atb_modules.testing.npu.dry_run"]
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
    return Launch(name, tuple(described))


def _perform(call: DryCall) -> DryResult:
    namespace, _, rest = call.operator.partition("::")
    name, _, overload = rest.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    args, kwargs = tree_map(
        lambda value: value.build() if isinstance(value, TensorSpec) else value, (list(call.args), dict(call.kwargs))
    )
    try:
        with dry_run() as launches:
            operator(*args, **kwargs)
    except Exception as error:
        return DryResult(error=str(error) or repr(error))
    return DryResult(tuple(launches))


def _serve() -> None:
    """The other process: a request on stdin, results on stdout, whatever else is printed on stderr."""
    results_to = os.dup(1)
    os.dup2(2, 1)
    soc, calls, directory = pickle.loads(sys.stdin.buffer.read())
    boot(soc, torch_npu_dir=directory)
    results = [_perform(call) for call in calls]
    with os.fdopen(results_to, "wb") as out:
        out.write(pickle.dumps(results))


if __name__ == "__main__":
    from atb_modules.testing.npu import dry_run as module  # the classes must carry the importable module's name

    module._serve()

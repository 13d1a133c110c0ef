"""Imports torch_npu on a machine with neither CANN nor an NPU, as many devices as asked, on the SoC asked.

Schemas, Meta kernels, autograd formulas and host code are torch_npu's own; device memory is host memory and no kernel
can run. ``EmulatedNPU`` computes in their place. All that is shown so is *emulated*: nothing of it ran on an NPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from atb_modules.kernels.ascend.socs import Soc, find_soc
from atb_modules.testing.npu.errors import BootError
from atb_modules.testing.npu.printing import print_from_memory
from atb_modules.testing.npu.stubs import ALLOCATOR_KEYS, RUNTIME, build_stubs
from atb_modules.testing.npu.wheel import CANN, find_wheel, wheel_version

#: Keys of the CUDA allocator's configuration, which torch_npu registers too.
_CUDA_KEYS = (
    b"backend",
    b"release_lock_on_cudamalloc",
    b"pinned_use_cuda_host_register",
    b"release_lock_on_hipmalloc",
    b"pinned_use_hip_host_register",
    b"graph_capture_record_stream_reuse",
    b"pinned_reserve_segment_size_mb",
    b"pinned_num_register_threads",
    b"per_process_memory_fraction",
    b"throw_on_cudamalloc_oom",
)


@dataclass(frozen=True)
class Booted:
    """What runs in this process: the module ``torch_npu``, the SoC it believes in, and where its parts lie."""

    torch_npu: ModuleType
    soc: Soc
    devices: int
    version: str
    directory: Path
    stubs: Path
    runtime: ctypes.CDLL

    def unanswered(self) -> str:
        """The last function of CANN that was called and has no answer; empty if none was."""
        return self.runtime.emulated_npu_unanswered().decode()

    def host_waits(self) -> int:
        """How often the runtime was asked to wait for a device, a stream or an event, or for a blocking copy."""
        return self.runtime.emulated_host_wait_count()


_BOOTED: Booted | None = None


def booted() -> Booted | None:
    """What ``boot`` made in this process; None before it ran."""
    return _BOOTED


def boot(soc: str = "ascend910b1", devices: int = 1, torch_npu_dir: str | Path | None = None) -> Booted:
    """Build the stubs (once; they are cached), load them and import torch_npu.

    A process has one SoC and one number of devices: torch_npu reads both once. Calling again with the same is free.

    Args:
        soc: a key of ``kernels.ascend.socs.SOCS``, or a version of one ("Ascend910_9391").
        devices: how many ``npu:`` devices there are; 0 for schemas and Meta kernels alone.
        torch_npu_dir: directory that holds torch_npu; default ``$ATB_TORCH_NPU_DIR``, then the environment's
            ``torch_npu``.

    Raises:
        BootError: without the wheel, a compiler, or where this process cannot become an emulated NPU any more.
        ValueError: for a SoC without numbers or a negative number of devices.
    """
    global _BOOTED
    chip = find_soc(soc)
    if not isinstance(devices, int) or isinstance(devices, bool) or not 0 <= devices <= 16:
        raise ValueError(f"devices is {devices!r}; allowed: 0 to 16")
    if _BOOTED is not None:
        if (_BOOTED.soc, _BOOTED.devices) != (chip, devices):
            raise BootError(
                f"this process has booted {_BOOTED.devices} devices of {_BOOTED.soc.name}, asked for {devices} of "
                f"{chip.name}; torch_npu reads the SoC once, so start another process"
            )
        return _BOOTED
    _refuse_unfit_process()
    directory = find_wheel(torch_npu_dir)
    stubs = build_stubs(directory, Path(torch.__file__).parent / "lib")
    runtime = _load(stubs)
    runtime.emulated_npu_configure(chip.version.encode(), devices, ctypes.c_size_t(chip.hbm))
    module = _import_torch_npu(directory, stubs)
    _BOOTED = Booted(module, chip, devices, wheel_version(directory), directory, stubs, runtime)
    return _BOOTED


def _refuse_unfit_process() -> None:
    if "torch_npu" in sys.modules:
        raise BootError("torch_npu is imported already, on a real CANN or by a failed boot; start another process")
    active = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if active is not None:
        raise BootError(
            f"the accelerator of this process is {active.type}; torch allows one, so hide it (for CUDA: "
            "CUDA_VISIBLE_DEVICES= in the environment) to emulate an NPU"
        )


def _load(stubs: Path) -> ctypes.CDLL:
    """Map the stubs: libraries that are mapped satisfy torch_npu's needs by name, with no search path set."""
    runtime = ctypes.CDLL(str(stubs / RUNTIME), mode=ctypes.RTLD_GLOBAL)
    runtime.emulated_npu_unanswered.restype = ctypes.c_char_p
    runtime.emulated_host_wait_count.restype = ctypes.c_long
    runtime.emulated_operators_lines.restype = ctypes.c_char_p
    runtime.emulated_npu_configure.argtypes = (ctypes.c_char_p, ctypes.c_uint, ctypes.c_size_t)
    for name in CANN:
        ctypes.CDLL(str(stubs / name), mode=ctypes.RTLD_GLOBAL)
    if torch.version.cuda or torch.version.hip:
        keys = ctypes.CDLL(str(stubs / ALLOCATOR_KEYS))
        keys.emulated_npu_withdraw_keys((ctypes.c_char_p * len(_CUDA_KEYS))(*_CUDA_KEYS), len(_CUDA_KEYS))
    return runtime


def _import_torch_npu(directory: Path, stubs: Path) -> ModuleType:
    """Import it from a directory without surprises: it looks for CANN's version in all files below the current one."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # for processes started from this one
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")  # host code runs on the calling thread
    sys.path.append(str(directory))
    try:
        # it misses ASCEND_HOME_PATH, which is the point, and says so
        with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(stubs):
            import torch_npu
    except Exception as error:
        sys.path.remove(str(directory))
        raise BootError(f"torch_npu in {directory} does not import on the stubs: {error}") from error
    print_from_memory()
    return torch_npu

"""The emulated NPU: torch_npu's real wheel on stubs of CANN, for machines without an NPU.

* ``boot`` loads torch_npu with a fake ``npu:0`` whose memory is host memory;
* ``EmulatedNPU`` computes: fused operators by written references that follow the documentation, the rest on the CPU;
* ``dry_run`` lists the operators that torch_npu's own host code would launch.

It is installed with the package, so that users can check their own NPU code without an NPU. What it shows is
*emulated*: it tests the calls against our reading of the documentation, never the kernels.
"""

from atb_modules.testing.npu.boot import Booted, boot, booted
from atb_modules.testing.npu.dispatch import EmulatedNPU
from atb_modules.testing.npu.errors import BootError, HostSyncError, NoReferenceError, OperatorError
from atb_modules.testing.npu.host_code import DryCall, DryResult, Launch, TensorSpec, dry_run, dry_run_on

__all__ = [
    "BootError",
    "DryCall",
    "DryResult",
    "Booted",
    "EmulatedNPU",
    "HostSyncError",
    "Launch",
    "NoReferenceError",
    "OperatorError",
    "TensorSpec",
    "boot",
    "booted",
    "dry_run",
    "dry_run_on",
]

"""``python -m atb_modules.testing.npu [soc] [--devices N]``: boot the emulated NPU and say what booted.

Exit status: 0 it booted, 2 for arguments that cannot be served.
"""

from __future__ import annotations

import argparse

import torch

from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.testing.npu.boot import boot
from atb_modules.testing.npu.errors import BootError


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; leaves by SystemExit where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m atb_modules.testing.npu", description=__doc__)
    parser.add_argument("soc", nargs="?", default="ascend910b1", help=f"one of {', '.join(SOCS)}")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="how many, 0 to 16; default 1")
    asked = parser.parse_args(arguments)
    try:
        what = boot(asked.soc, asked.devices)
    except (ValueError, BootError) as error:
        parser.error(str(error))
    schemas = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(("npu::", "atb::"))]
    print("emulated: nothing below runs on an NPU")
    print(f"torch       {torch.__version__}")
    print(f"torch_npu   {what.version} from {what.directory}")
    print(f"stubs       {what.stubs}")
    print(f"SoC         {what.soc.version} ({what.soc.name}), {what.devices} device(s)")
    print(f"operators   {len(set(schemas))} names, {len(schemas)} schemas in npu:: and atb::")


if __name__ == "__main__":
    main()

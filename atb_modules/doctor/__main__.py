"""``python -m atb_modules.doctor``: the report, or what a log means.

Exit status of the report: 0 fine, 1 a mismatch or a kernel that fails. Of ``--explain LOGFILE``: 0 something was
explained, 1 nothing known was found. 2 for arguments that cannot be served. Where `import torch` itself fails because
torch_npu does, set TORCH_DEVICE_BACKEND_AUTOLOAD=0: the report then tells why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from atb_modules.doctor import explain_log, report
from atb_modules.kernels.ascend.socs import SOCS, find_soc


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m atb_modules.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--soc", metavar="SOC", help=f"an Ascend chip to plan for: {', '.join(SOCS)}")
    parser.add_argument(
        "--slow", action="store_true", help="run kernels that compile for each call, too (half a minute)"
    )
    parser.add_argument("--no-kernels", action="store_true", help="look at software and environment alone")
    parser.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="LOGFILE",
        help="name the known errors in a log (- for standard input); without LOGFILE: the environment alone",
    )
    parser.add_argument("--emulate", metavar="SOC", help="check the NPU kernels on an emulated NPU (needs torch_npu)")
    asked = parser.parse_args(arguments)
    if asked.explain:
        return _explain(parser, asked.explain, asked.json)
    for option in ("soc", "emulate"):
        try:
            if getattr(asked, option) is not None:
                find_soc(getattr(asked, option))
        except ValueError as error:
            parser.error(f"--{option}: {error}")
    if asked.emulate is not None:
        from atb_modules.testing.npu import BootError, boot

        try:
            boot(asked.emulate)
        except BootError as error:
            parser.error(f"--emulate: {error}")
    found = report(asked.soc, kernels=not asked.no_kernels and asked.explain is None, slow=asked.slow)
    _print(json.dumps(found.as_dict(), indent=2, allow_nan=False) if asked.json else str(found))
    return 0 if found.ok else 1


def _explain(parser: argparse.ArgumentParser, log: str, as_json: bool) -> int:
    try:
        found = explain_log(sys.stdin.buffer if log == "-" else log)
    except OSError as error:
        parser.error(f"{log} cannot be read: {error.strerror or error}")
    _print(json.dumps(found.as_dict(), indent=2) if as_json else str(found))
    return 0 if found.found else 1


def _print(text: str) -> None:
    """Characters that the terminal's encoding lacks are replaced: a log may hold any. A reader may leave early."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # What is still buffered goes nowhere, and nobody complains when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

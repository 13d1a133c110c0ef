"""``python -m benchmarks [NAME ...] [--json FILE]``: run all benchmarks, or those that are named.

Each runs in a process of its own: what one leaves behind in the allocator and in compiled code does not colour the
next.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import HEADER, write_json

BENCHMARKS = (
    "decode",
    "prefill",
    "elementwise",
    "cache",
    "generate",
    "attention",
    "sparse",
    "moe",
    "families",
    "vision",
    "multimodal",
    "vlm",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/latest.json"), help="where the rows go")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(BENCHMARKS)}")
    names = arguments.names or list(BENCHMARKS)
    print(HEADER, flush=True)
    if len(names) == 1:
        run(names[0], arguments.json)
    else:
        run_apart(names, arguments.json)
    print("ratio: peer time / our time, paired median. (*) on a CPU without bfloat16 units.")


def run(name: str, target: Path) -> None:
    """One benchmark in this process."""
    module = importlib.import_module(f"benchmarks.{name}")
    rows = []
    for line in module.rows():
        print(line, flush=True)
        rows.append(line)
    for remark in getattr(module, "remarks", list)():
        print(remark, flush=True)
    write_json(rows, target)


def run_apart(names: list[str], target: Path) -> None:
    """Each benchmark in a process of its own, all rows in one file."""
    collected: dict = {"rows": []}
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            part = Path(directory, f"{name}.json")
            code = f"from benchmarks.__main__ import *; run({name!r}, Path({str(part)!r}))"
            subprocess.run([sys.executable, "-c", code], check=True)
            data = json.loads(part.read_text())
            collected = {**data, "rows": collected["rows"] + data["rows"]}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(collected, indent=2) + "\n")


if __name__ == "__main__":
    main()

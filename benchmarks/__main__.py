"""``python -m benchmarks [NAME ...] [--json FILE]``: run all benchmarks, or those that are named."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import attention, cache, decode, elementwise, prefill
from benchmarks.timing import HEADER, Row, write_json

BENCHMARKS = {
    "decode": decode.rows,
    "prefill": prefill.rows,
    "elementwise": elementwise.rows,
    "cache": cache.rows,
    "attention": attention.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/latest.json"), help="where the rows go")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(BENCHMARKS)}")
    rows: list[Row] = []
    print(HEADER)
    for name in arguments.names or BENCHMARKS:
        for line in BENCHMARKS[name]():
            print(line, flush=True)
            rows.append(line)
        if name == "cache":
            paged, padded = cache.memory()
            print(f"ragged batch of 8: {paged / 2**20:.0f} MiB in pages, {padded / 2**20:.0f} MiB left-padded, "
                  f"{1 - paged / padded:.0%} less (goal >= 22%)")  # fmt: skip
    print("ratio: peer time / our time, paired median. (*) on a CPU without bfloat16 units.")
    write_json(rows, arguments.json)


if __name__ == "__main__":
    main()

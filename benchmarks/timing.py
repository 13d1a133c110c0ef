"""Interleaved timing, medians and paired ratios; the table and the JSON that every benchmark prints."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

Timings = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in seconds."""

    name: str
    ours: float
    peer_name: str
    peer: float
    #: how many times as fast as the peer (paired median)
    ratio: float
    #: what is wanted of ``ratio``, e.g. ">= 2.8"
    goal: str
    limit_name: str = ""
    limit: float | None = None

    @property
    def share_of_limit(self) -> float | None:
        return None if self.limit is None else self.limit / self.ours

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"{1e3 * self.limit:9.2f} {self.share_of_limit:6.0%} of {self.limit_name}"
        return (
            f"{self.name:<52} {1e3 * self.ours:9.2f} {1e3 * self.peer:9.2f} {self.ratio:6.2f}x {self.goal:>8}  "
            f"{limit:<40} vs {self.peer_name}"
        )


HEADER = f"{'':<52} {'ours ms':>9} {'peer ms':>9} {'ratio':>7} {'goal':>8}  {'limit ms, share':<40}"


def interleave(
    functions: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2, settle: bool = False
) -> Timings:
    """Run every function once a round, in turn, so that a machine that drifts drifts for all of them.

    ``settle`` runs each once more before it is timed, so that nobody pays for what the one before left behind (caches
    full of other memory, a lower clock after a long stretch of wide vectors).
    """
    times: Timings = {name: [] for name in functions}
    for index in range(warmup + rounds):
        for name, function in functions.items():
            if settle:
                function()
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if index >= warmup:
                times[name].append(elapsed)
    return times


def median(times: Timings, name: str) -> float:
    return statistics.median(times[name])


def paired_ratio(times: Timings, peer: str, ours: str) -> float:
    """Median over rounds of peer time / our time: above 1 we are faster."""
    return statistics.median(p / o for p, o in zip(times[peer], times[ours], strict=True))


def row(
    name: str,
    times: Timings,
    peer: str,
    goal: str,
    *,
    ours: str = "ours",
    limit_name: str = "",
    limit: float | None = None,
) -> Row:
    """The line that compares two entries of one interleaved run."""
    return Row(
        name, median(times, ours), peer, median(times, peer), paired_ratio(times, peer, ours), goal, limit_name, limit
    )


class ReadBandwidth:
    """A plain sum over 256 MB, four times in a row, called inside the interleaved run: how fast memory is read."""

    REPEATS = 4

    def __init__(self) -> None:
        self.buffer = torch.ones(64 * 2**20)

    def __call__(self) -> None:
        for _ in range(self.REPEATS):
            self.buffer.sum()

    def seconds_for(self, times: Timings, name: str, nbytes: float) -> float:
        """Time to read ``nbytes`` at the rate measured as entry ``name``."""
        return median(times, name) * nbytes / (self.REPEATS * self.buffer.numel() * 4)


def write_json(rows: list[Row], path: Path) -> None:
    """The rows as data, with the share of the limit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [asdict(r) | {"share_of_limit": r.share_of_limit} for r in rows]
    path.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": data}, indent=2) + "\n")

"""What a log says: its known errors, the likeliest cause first, each with the line that shows it.

Logs are read as a stream: of any size, in any encoding, with lines of any length.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from atb_modules.doctor.known_errors import KNOWN_ERRORS

#: what is read at once; a line that is longer is looked at in pieces, which overlap
_BLOCK = 1 << 18
_OVERLAP = 256
_WORDS = tuple(sorted({word.encode() for error in KNOWN_ERRORS for word in error.words}))
#: what is kept of a line for print
_SHOWN = 300


@dataclass(frozen=True)
class Cause:
    """A known error in a log: where it stands first, how many lines show it, what it means and what to do."""

    name: str
    line_number: int
    line: str
    lines: int
    meaning: str
    next_steps: tuple[str, ...]


@dataclass(frozen=True)
class LogExplanation:
    """The causes that are known, the likeliest first; ``str()`` for a terminal, ``as_dict()`` for JSON."""

    causes: tuple[Cause, ...]
    lines_read: int
    logs_at: str

    @property
    def found(self) -> bool:
        return bool(self.causes)

    def as_dict(self) -> dict[str, Any]:
        return {"found": self.found, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        if not self.found:
            return "\n".join(
                [
                    f"{self.lines_read} lines read, none of which is a known error.",
                    f"  CANN's own logs lie in {self.logs_at}: read the first ERROR line of the newest file.",
                    "  An error of an asynchronous operator is raised by a later one: run again with",
                    "    ASCEND_LAUNCH_BLOCKING=1 ASCEND_GLOBAL_LOG_LEVEL=1 python ...",
                ]
            )
        blocks = []
        for number, cause in enumerate(self.causes, start=1):
            more = f" (and {cause.lines - 1} more)" if cause.lines > 1 else ""
            steps = [f"     -> {step}" for step in cause.next_steps]
            shown = f"     line {cause.line_number}{more}: {cause.line}"
            blocks.append("\n".join([f"{number:2}. {cause.name}: {cause.meaning}", shown, *steps]))
        return "\n".join(blocks)


def explain_log(log: str | os.PathLike[str] | BinaryIO, environ: Mapping[str, str] | None = None) -> LogExplanation:
    """The known errors of a log.

    Args:
        log: a path, or a binary stream, which is read to its end.
        environ: environment variables that say where CANN writes its logs; default those of the process.

    Raises:
        OSError: where the file cannot be read. TypeError: for something else than a path or a binary stream.
    """
    if isinstance(log, (str, os.PathLike)):
        with Path(log).open("rb") as stream:
            return _explain(_pieces(stream), environ)
    if not hasattr(log, "readline") or isinstance(log, io.TextIOBase):
        raise TypeError(f"log is {type(log).__name__}; allowed: a path or a binary stream")
    return _explain(_pieces(log), environ)


def explain_lines(lines: Iterable[str], environ: Mapping[str, str] | None = None) -> LogExplanation:
    """``explain_log`` of lines that are there already."""
    return _explain(enumerate(lines, start=1), environ)


def _pieces(stream: BinaryIO, size: int = _BLOCK) -> Iterator[tuple[int, str | None]]:
    """(number of the line, text): a line, or a piece of a long one; None in the place of a block without any word."""
    number, tail = 1, b""
    while block := stream.read(size):
        if not block.endswith(b"\n"):
            block += stream.readline(size)
        block = tail + block
        *whole, rest = block.split(b"\n")
        lower = block.lower()
        if any(word in lower for word in _WORDS):
            for line in (*whole, rest) if rest else whole:
                yield number, line.decode("utf-8", errors="replace")
                number += 1
            number -= bool(rest)
        else:
            yield number + len(whole) - (not rest), None
            number += len(whole)
        tail = rest[-_OVERLAP:]


def _explain(numbered: Iterable[tuple[int, str | None]], environ: Mapping[str, str] | None) -> LogExplanation:
    environ = os.environ if environ is None else environ
    first: dict[int, tuple[int, str]] = {}
    last: dict[int, int] = {}
    counts: dict[int, int] = {}
    number = 0
    for number, line in numbered:
        if line is None:
            continue
        lower = line.lower()
        for index, error in enumerate(KNOWN_ERRORS):
            match = error.find(line, lower)
            if match is None or last.get(index) == number:
                continue
            last[index] = number
            first.setdefault(index, (number, _around(line, match.start())))
            counts[index] = counts.get(index, 0) + 1
    causes = tuple(
        Cause(KNOWN_ERRORS[i].name, *first[i], counts[i], KNOWN_ERRORS[i].meaning, KNOWN_ERRORS[i].next_steps)
        for i in sorted(first)
    )
    home = environ.get("ASCEND_PROCESS_LOG_PATH") or "~/ascend/log"
    return LogExplanation(causes, number, f"{home}/debug/plog")


def _around(line: str, place: int) -> str:
    """The line without the characters that would move a terminal's cursor, or its part around ``place``."""
    begin = max(0, place - _SHOWN // 2) if len(line) > _SHOWN else 0
    shown = line[begin : begin + _SHOWN].strip()
    return "".join(character if character.isprintable() else " " for character in shown)

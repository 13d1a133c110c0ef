"""Where the doctor looks, so that a test or a user can point it elsewhere; reading that never raises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

#: more than any version file holds
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Places:
    """What the doctor reads.

    Args:
        environ: environment variables.
        root: directory that stands for ``/`` in the default places of drivers and CANN.
        package_path: directories of installed Python packages; default ``sys.path``.
        torch_version: version of torch to judge; default that of the process.
        command_seconds: how long a command (npu-smi, an import in a process of its own) may take.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    package_path: tuple[str, ...] | None = None
    torch_version: str | None = None
    command_seconds: float = 60.0

    def at_root(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def distributions(self, name: str) -> list[metadata.Distribution]:
        """The installed packages of this name, the one that is imported first."""
        path = list(sys.path) if self.package_path is None else list(self.package_path)
        found: list[metadata.Distribution] = []
        for distribution in metadata.distributions(name=name, path=path):
            try:
                version = distribution.version
            except Exception:  # metadata of a broken installation, whatever is wrong with it
                continue
            if isinstance(version, str) and version:
                found.append(distribution)
        return found


def read_text(path: Path) -> tuple[str, str | None]:
    """(text, problem): the first 64 KiB of a file, bytes that are no UTF-8 replaced; a problem instead of an error."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", errors="replace"), None
    except OSError as error:
        return "", f"{path} cannot be read: {error.strerror or error}"


def read_settings(path: Path) -> tuple[dict[str, str], str | None]:
    """(settings, problem) of a file of ``key=value`` lines; keys in lower case, the first of several counts."""
    text, problem = read_text(path)
    settings: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            settings.setdefault(key.strip().lower(), value.strip().strip("\"'"))
    if problem is None and not settings:
        problem = f"{path} holds no key=value line"
    return settings, problem


def is_directory(path: str | Path) -> bool:
    """Whether it is one that can be looked into; False where asking is not permitted."""
    try:
        return Path(path).is_dir() and os.access(path, os.R_OK | os.X_OK)
    except OSError:
        return False


def find_files(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files below ``directory`` that match, by pattern, then by name; none where it cannot be read."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        try:
            found |= dict.fromkeys(sorted(path for path in directory.glob(pattern) if path.is_file()))
        except OSError:
            continue
    return list(found)


def run_command(command: list[str], environ: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """(exit status, output and errors together); None with the reason where it did not end by itself."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} did not answer in {seconds:g} s"
    except OSError as error:
        return None, f"{command[0]} cannot be run: {error.strerror or error}"
    return done.returncode, done.stdout.decode("utf-8", errors="replace")

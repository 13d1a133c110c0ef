"""Where what the test tools compile is kept: built once for the same sources, compiler and options."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path


def cache_root() -> Path:
    """``$ATB_MODULES_CACHE``, or ``~/.cache/atb_modules``."""
    asked = os.environ.get("ATB_MODULES_CACHE")
    return Path(asked) if asked else Path.home() / ".cache" / "atb_modules"


def compiler_version(compiler: str = "g++") -> str:
    """The first line of ``compiler --version``. Raises RuntimeError where there is none."""
    try:
        shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{compiler} does not run ({error}); it is needed to build the emulation") from error
    return shown.splitlines()[0]


def cached_build(name: str, parts: Iterable[str | bytes], build: Callable[[Path], None]) -> Path:
    """The directory that ``build(directory)`` filled for such ``parts`` (sources, options, versions), now or before.

    A build that fails leaves nothing behind; two processes that build the same do not see each other's half.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    target = cache_root() / f"{name}-{digest.hexdigest()[:16]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f"{target.name}.{os.getpid()}")
    half.mkdir()
    try:
        build(half)
        try:
            half.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        if half.is_dir():
            for path in sorted(half.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            half.rmdir()
    return target

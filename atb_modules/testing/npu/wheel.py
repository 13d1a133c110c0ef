"""Where torch_npu lies, and what its shared libraries ask of CANN.

torch_npu must not be installed into the environment's own site-packages: its entry point would make `import torch` fail
on a machine without CANN. It lies in a directory of its own:

    pip install --no-deps --target .venv/torch_npu torch_npu==2.14.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from atb_modules.testing.npu.errors import BootError

#: Environment variable that names the directory.
DIRECTORY_VARIABLE = "ATB_TORCH_NPU_DIR"
INSTALL_COMMAND = "pip install --no-deps --target {directory} torch_npu==2.14.0"
#: Shared libraries of the wheel that torch_npu's import loads, relative to the package.
LIBRARIES = ("lib/libtorch_npu.so", "lib/libop_plugin_atb.so", "lib/libnpu_profiler.so", "lib/libtensorpipe.so")
#: Parts of CANN that these need, by soname; libopapi is looked up when the first operator runs.
CANN = (
    "libhccl.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
    "libopapi.so",
)
_SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")


def default_directory() -> Path:
    """``$ATB_TORCH_NPU_DIR``, or ``torch_npu`` inside the virtual environment."""
    asked = os.environ.get(DIRECTORY_VARIABLE)
    return Path(asked) if asked else Path(sys.prefix) / "torch_npu"


def find_wheel(directory: str | Path | None = None) -> Path:
    """The directory that holds the package ``torch_npu``.

    Raises:
        BootError: where it holds none, with the command that puts it there.
    """
    found = (default_directory() if directory is None else Path(directory)).absolute()
    if not (found / "torch_npu" / LIBRARIES[0]).is_file():
        command = INSTALL_COMMAND.format(directory=found)
        raise BootError(
            f"no torch_npu in {found} (argument torch_npu_dir, ${DIRECTORY_VARIABLE} or the environment's "
            f"directory torch_npu); put it there with `{command}`"
        )
    return found


def wheel_version(directory: Path) -> str:
    """The version of the package, without importing it."""
    text = (directory / "torch_npu" / "version.py").read_text()
    found = re.search(r"__version__ = ['\"]([^'\"]+)", text)
    return found.group(1) if found else "unknown"


def wheel_libraries(directory: Path) -> list[Path]:
    """The shared libraries of the wheel that are loaded on import."""
    package = directory / "torch_npu"
    libraries = [package / name for name in LIBRARIES if (package / name).is_file()]
    return libraries + sorted(package.glob("_C*.so"))


def symbols(library: Path, *, defined: bool) -> Iterator[str]:
    """Names of the dynamic symbols that ``library`` defines, or those it needs from others (weak ones left out)."""
    option = "--defined-only" if defined else "--undefined-only"
    try:
        shown = subprocess.run(["nm", "-D", option, str(library)], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BootError(f"nm cannot read {library} ({error}); binutils are needed") from error
    for line in shown.splitlines():
        kind, name = line.split()[-2:]
        if defined or kind == "U":
            yield name.split("@")[0]


def missing_symbols(directory: Path, torch_libraries: Path) -> list[str]:
    """Symbols that nobody on this machine defines: what CANN would have to bring."""
    libraries = wheel_libraries(directory)
    there: set[str] = set()
    for library in [*torch_libraries.glob("*.so*"), *libraries, *_system_libraries()]:
        there.update(symbols(library, defined=True))
    needed = {name for library in libraries for name in symbols(library, defined=False)}
    return sorted(name for name in needed - there if not name.startswith(("Py", "_Py")))


def operator_names(directory: Path) -> list[str]:
    """The entry points of libopapi that torch_npu's host code looks up by name."""
    found: set[str] = set()
    for name in ("libtorch_npu.so", "libop_plugin_atb.so"):
        data = (directory / "torch_npu" / "lib" / name).read_bytes()
        found.update(match.decode() for match in re.findall(rb"(?<=\0)(?:aclnn|aclRfft|aclStft)\w+(?=\0)", data))
    bases = {name.removesuffix("GetWorkspaceSize") for name in found}
    return sorted(bases)


def _system_libraries() -> Iterator[Path]:
    for name in _SYSTEM:
        try:
            shown = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BootError(f"g++ does not run ({error}); it is needed to build the stubs of CANN") from error
        path = Path(shown.stdout.strip())
        if path.is_absolute() and path.exists():
            yield path

"""What the environment variables say, and whether software and environment go together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from atb_modules.doctor.data import Finding, Level, Software, Verdict
from atb_modules.doctor.matrix import NUMPY_2_FROM, PairVerdict, judge_pair, minor
from atb_modules.doctor.places import Places, is_directory, run_command
from atb_modules.kernels.ascend import ascendc

#: variables that decide what is loaded
PATHS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH", "ATB_HOME_PATH")
#: variables that change how it runs
SWITCHES = (
    "ASCEND_CUSTOM_OPP_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_LAUNCH_BLOCKING",
    "TASK_QUEUE_ENABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "PYTORCH_NPU_ALLOC_CONF",
    "CPU_AFFINITY_CONF",
    "INF_NAN_MODE_ENABLE",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "ASCEND_GLOBAL_LOG_LEVEL",
    "ASCEND_SLOG_PRINT_TO_STDOUT",
    "ASCEND_PROCESS_LOG_PATH",
    "ATB_TORCH_NPU_DIR",
    "OMP_NUM_THREADS",
)
_LIBRARIES = "LD_LIBRARY_PATH"
_ASCEND = re.compile(r"ascend|cann|nnal", re.IGNORECASE)


def variables_of(places: Places) -> tuple[tuple[str, str], ...]:
    """The variables that are set, of ``LD_LIBRARY_PATH`` the entries that have to do with Ascend."""
    found = [(name, places.environ[name]) for name in (*PATHS, *SWITCHES) if name in places.environ]
    entries = _library_entries(places)
    if entries:
        found.append((_LIBRARIES, ":".join(entries)))
    return tuple(found)


def _library_entries(places: Places) -> list[str]:
    home = places.environ.get("ASCEND_HOME_PATH") or "\0"
    entries = places.environ.get(_LIBRARIES, "").split(":")
    return [entry for entry in entries if entry and (_ASCEND.search(entry) or entry.startswith(home))]


def check_environment(software: Software, places: Places) -> tuple[PairVerdict, list[Finding]]:
    """The verdict on this installation, and every finding behind it."""
    if software.emulated:
        text = "torch_npu runs on stubs: nothing below is shown on an NPU, and there is no CANN to judge"
        findings = [Finding(Level.NOTE, "emulated", text), *_torch_pin(software)]
        return _overall(PairVerdict(Verdict.UNKNOWN, "emulated: torch_npu runs without CANN"), findings), findings
    findings = [
        *_torch_pin(software),
        *_set_env(software, places),
        *_paths(places),
        *_libraries(software, places),
        *_atb(software, places),
        *_ascend_c(software),
        *_numpy(software),
        *_driver(software),
        *_switches(places),
        *_import(software, places),
    ]
    return _overall(judge_pair(software.cann.value, software.torch_npu.value), findings), findings


def _overall(pair: PairVerdict, findings: list[Finding]) -> PairVerdict:
    against = [finding for finding in findings if finding.level is Level.MISMATCH]
    if not against:
        return pair
    subjects = ", ".join(dict.fromkeys(finding.subject for finding in against))
    return PairVerdict(Verdict.MISMATCHED, f"known not to work as it is: {subjects}")


def _torch_pin(software: Software) -> Iterator[Finding]:
    """torch_npu X.Y is built against the C++ interface of torch X.Y alone."""
    version = software.torch_npu.value
    if version is None:
        return
    needed, here = minor(version), minor(software.torch)
    if needed is None or here is None:
        yield Finding(Level.WARNING, "torch", f"torch_npu {version} and torch {software.torch} cannot be compared")
    elif needed != here:
        wanted = f"{needed[0]}.{needed[1]}"
        text = f"torch_npu {version} needs torch {wanted}.*, here is torch {software.torch}"
        yield Finding(Level.MISMATCH, "torch", text, f"pip install 'torch=={wanted}.*', or the torch_npu of this torch")
    elif software.torch_pin and not _satisfies(software.torch.split("+")[0], software.torch_pin):
        text = f"torch_npu {version} asks for torch=={software.torch_pin}, here is torch {software.torch}"
        yield Finding(Level.WARNING, "torch", text, f"pip install 'torch=={software.torch_pin}'")


def _satisfies(version: str, pin: str) -> bool:
    pin = pin.split("+")[0]
    return version.startswith(pin[:-1]) or version == pin[:-2] if pin.endswith(".*") else version == pin


def _set_env(software: Software, places: Places) -> Iterator[Finding]:
    wanted = software.torch_npu.value is not None
    level = Level.MISMATCH if wanted else Level.NOTE
    named = places.environ.get("ASCEND_HOME_PATH") or places.environ.get("ASCEND_TOOLKIT_HOME")
    if software.cann_home is None:
        if wanted and not named:
            text = "torch_npu is installed, but CANN is neither in the environment nor in its default places"
            step = "install CANN, then source its set_env.sh"
            yield Finding(Level.MISMATCH, "CANN", text, step)
        return
    if not named:
        text = f"CANN lies in {software.cann_home}, but its set_env.sh was not sourced (ASCEND_HOME_PATH is not set)"
        yield Finding(level, "environment", text, f"source {_set_env_of(Path(software.cann_home))}")
    elif "ASCEND_OPP_PATH" not in places.environ:
        text = "ASCEND_OPP_PATH is not set: operators are not found (error 148049)"
        yield Finding(level, "environment", text, f"source {_set_env_of(Path(software.cann_home))}")


def _set_env_of(home: Path) -> Path:
    """The script of a CANN; of ``.../ascend-toolkit/latest`` it lies one level up."""
    own = home / "set_env.sh"
    return own if home.name != "latest" or own.is_file() else home.parent / "set_env.sh"


def _paths(places: Places) -> Iterator[Finding]:
    for name in PATHS:
        value = places.environ.get(name)
        if value is not None and not is_directory(value):
            what = f"is {value!r}, which is no directory that can be read" if value else "is empty"
            step = "source the set_env.sh of the installation that is there, in a fresh shell"
            yield Finding(Level.MISMATCH, name, f"{name} {what}", step)


def _libraries(software: Software, places: Places) -> Iterator[Finding]:
    home = places.environ.get("ASCEND_HOME_PATH")
    if not home or not is_directory(home):
        return
    entries = _library_entries(places)
    ours, real = str(home).rstrip("/"), _resolved(home)
    under = [entry for entry in entries if entry.startswith(ours) or _resolved(entry).startswith(real)]
    if not under:
        level = Level.MISMATCH if software.torch_npu.value is not None else Level.WARNING
        text = f"{_LIBRARIES} has no entry of {home}: libascendcl.so and libhccl.so are not found"
        yield Finding(level, _LIBRARIES, text, f"source {_set_env_of(Path(home))}")
        return
    others = [entry for entry in entries[: entries.index(under[0])] if re.search(r"toolkit|cann", entry, re.IGNORECASE)]
    if others:
        text = f"{_LIBRARIES} names {others[0]} before {home}: libraries of another CANN may be loaded"
        yield Finding(Level.WARNING, _LIBRARIES, text, "source one set_env.sh alone, in a fresh shell")


def _resolved(path: str) -> str:
    try:
        return str(Path(path).resolve())
    except (OSError, RuntimeError):  # a link that leads to itself
        return path


def _atb(software: Software, places: Places) -> Iterator[Finding]:
    if software.atb_abi is not None and software.atb_abi != software.torch_abi:
        text = f"ATB is the build with C++ ABI {software.atb_abi}, torch has {software.torch_abi}: undefined symbols"
        step = f"source nnal/atb/set_env.sh --cxx_abi={software.torch_abi}"
        yield Finding(Level.MISMATCH, "ABI", text, step)
    if software.atb.source and "ATB_HOME_PATH" not in places.environ:
        text = "ATB (nnal) is installed, but ATB_HOME_PATH is not set: libatb.so is not found"
        yield Finding(Level.NOTE, "ATB", text, "source nnal/atb/set_env.sh where its operators are wanted")
    known = software.atb.value, software.cann.value
    if None not in known and known[0] != known[1]:
        text = f"ATB is of CANN {known[0]}, CANN is {known[1]}"
        yield Finding(Level.WARNING, "ATB", text, "install the nnal of this CANN")


def _ascend_c(software: Software) -> Iterator[Finding]:
    if software.ascend_c.value is None and software.cann_home is not None and software.torch_npu.value is not None:
        sources = Path(ascendc.__file__).parent
        step = f"cmake -S {sources} -B build/ascend && cmake --build build/ascend"
        yield Finding(Level.NOTE, "Ascend C", "our own kernels are not built; torch_npu's operators serve alone", step)


def _numpy(software: Software) -> Iterator[Finding]:
    numpy, cann = software.numpy.value, software.cann.value
    if numpy is None or cann is None:
        return
    major, old = minor(numpy), minor(cann)
    if major is not None and major[0] >= 2 and old is not None and old < NUMPY_2_FROM:
        text = f"numpy {numpy} beside CANN {cann}, whose Python parts were written for numpy 1"
        step = "where initialisation fails (500001, EH9999): pip install 'numpy<2'"
        yield Finding(Level.WARNING, "numpy", text, step)


def _driver(software: Software) -> Iterator[Finding]:
    if software.torch_npu.value is not None and not (software.driver.value or software.soc.value):
        text = "no driver was found; inside a container its directory and npu-smi must be mounted"
        yield Finding(Level.WARNING, "driver", text, "npu-smi info")
    elif software.soc.source and not software.soc.value:
        yield Finding(Level.WARNING, "SoC", software.soc.source, "npu-smi info")


def _switches(places: Places) -> Iterator[Finding]:
    environ = places.environ
    if environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        text = "ASCEND_LAUNCH_BLOCKING=1: every operator is waited for; right for a search, slow otherwise"
        yield Finding(Level.NOTE, "ASCEND_LAUNCH_BLOCKING", text, "unset it when the search is over")
    if environ.get("TASK_QUEUE_ENABLE") == "0":
        text = "TASK_QUEUE_ENABLE=0: operators are prepared on the calling thread, which costs speed"
        yield Finding(Level.NOTE, "TASK_QUEUE_ENABLE", text, "unset it where speed matters")
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        text = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: `import torch` does not load torch_npu"
        yield Finding(Level.NOTE, "TORCH_DEVICE_BACKEND_AUTOLOAD", text, "import torch_npu yourself")


def _import(software: Software, places: Places) -> Iterator[Finding]:
    """Whether torch_npu imports, tried in a process of its own where this one has not done it."""
    from atb_modules.doctor.log import explain_lines

    if software.torch_npu.value is None or "torch_npu" in sys.modules:
        return
    environ = {**places.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if places.package_path is not None:
        environ["PYTHONPATH"] = ":".join([*places.package_path, *sys.path])
    command = [sys.executable, "-c", "import torch, torch_npu"]
    status, output = run_command(command, environ, places.command_seconds)
    if status == 0:
        return
    if status is None:
        yield Finding(Level.WARNING, "import torch_npu", output)
        return
    explained = explain_lines(output.splitlines()).causes
    lines = [line for line in output.splitlines() if line.strip()]
    text = f"it fails: {lines[-1].strip()[:300] if lines else f'exit status {status}'}"
    step = (
        f"{explained[0].next_steps[0]} ({explained[0].meaning})" if explained else "python -c 'import torch, torch_npu'"
    )
    yield Finding(Level.MISMATCH, "import torch_npu", text, step)

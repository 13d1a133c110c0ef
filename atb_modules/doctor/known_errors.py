"""The error texts of an Ascend installation that are known, as data: what each means, and what to do.

The order is the order of specificity: where several are in one log, the first of this table is the likeliest cause.
Codes are those of CANN's runtime (``ACL_ERROR_*``), of its operator library and of its modules (``E?????``), as its
error code references list them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LOCALISE = "run again with ASCEND_LAUNCH_BLOCKING=1: the operator at fault is then the one that raises"
_PLOG = "read the first ERROR line of the newest file in ~/ascend/log/debug/plog"
_SET_ENV = "source CANN's set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh) in the shell that starts Python"
_VERSIONS = "compare the versions: python -m atb_modules.doctor"
_KERNELS = "install the operator (kernels) package of this CANN for this chip"
_SHAPES = "compare dtypes, shapes and layouts with the operator's documentation; atb_modules.explain tells its rules"
_MEMORY = "smaller batches or sequences; look at npu-smi info for other processes on the device"

#: What stands before a number that is an error code, and nothing between but punctuation.
_CONTEXT = (
    r"(?:(?:acl|rt)?error[ _-]?(?:code|no|id|number)?|(?:acl|rt)?err[ _-]?(?:code|no)?|errno"
    r"|(?:acl|rt)?ret(?:urn(?:ed|s)?)?(?:[ _-]?(?:code|value|val))?|(?:runtime|rt|acl)[ _]?result|code\s*[:=]"
    r"|fail(?:ed|ure)?(?: with)?)"
)
_BETWEEN = r"(?:\s+(?:is|was|of|code|value|with|by))?[\s:=,\[\](){}#'\"]{0,8}"


@dataclass(frozen=True)
class KnownError:
    """One error that is known.

    Args:
        name: what it is called in print.
        words: lower case; a line without any of them is not looked at.
        pattern: regular expression over the line, case ignored.
        meaning: the cause, in one sentence.
        next_steps: what to do, the likeliest first.
    """

    name: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    meaning: str
    next_steps: tuple[str, ...]

    def find(self, line: str, lower: str) -> re.Match[str] | None:
        """Where ``line`` (``lower``: in lower case) shows this error."""
        return self.pattern.search(line) if any(word in lower for word in self.words) else None


def _text(name: str, words: tuple[str, ...], pattern: str, meaning: str, *next_steps: str) -> KnownError:
    return KnownError(name, words, re.compile(pattern, re.IGNORECASE), meaning, next_steps)


def _number(number: int) -> str:
    """A whole number behind a word for an error: "error code is 507035", "retCode is 0x7bc9b", never "step 507035"."""
    return rf"(?<![\w.]){_CONTEXT}{_BETWEEN}(?<![\w.])(?:{number}|{number:#x})(?![\w]|\.\d)"


def _code(number: int, symbol: str | None, meaning: str, *next_steps: str) -> KnownError:
    """A numeric code, decimal or hexadecimal, or its symbol."""
    pattern = _number(number) if symbol is None else rf"{_number(number)}|\b{symbol}\b"
    words = (*_words(number), *(() if symbol is None else (symbol.lower(),)))
    return _text(str(number), words, pattern, meaning, *next_steps)


def _words(*numbers: int) -> tuple[str, ...]:
    """How codes are written."""
    return tuple(word for number in numbers for word in (str(number), f"{number:#x}"))


def _module_code(name: str, meaning: str, *next_steps: str) -> KnownError:
    """A code of a module, "EZ9999", which stands alone in a log."""
    return _text(name, (name.lower(),), rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", meaning, *next_steps)


KNOWN_ERRORS: tuple[KnownError, ...] = (
    _text(
        "libatb.so missing",
        ("libatb.so",),
        r"libatb\.so[^:]{0,60}: cannot open shared object|cannot find .{0,40}libatb\.so|libatb\.so.{0,40}not found",
        "the loader does not find ATB: nnal's set_env.sh was not sourced, or nnal is not installed",
        "source /usr/local/Ascend/nnal/atb/set_env.sh",
        "install the nnal package of this CANN",
    ),
    _text(
        "CANN libraries missing",
        ("libhccl.so", "libascendcl.so", "libge_runner.so", "libgraph.so", "libacl_", "libopapi.so", "libruntime.so"),
        r"lib(?:hccl|ascendcl|ge_runner|graph|acl_\w+|opapi|runtime)\.so[^:]{0,60}: cannot open shared object"
        r"|lib(?:hccl|ascendcl|ge_runner|graph|acl_\w+|opapi|runtime)\.so.{0,40}not found",
        "the loader does not find CANN: its set_env.sh was not sourced",
        _SET_ENV,
        "in a container: mount CANN and the driver's directory",
    ),
    _text(
        "libascend_hal.so missing",
        ("libascend_hal.so",),
        r"libascend_hal\.so[^:]{0,60}: cannot open shared object|libascend_hal\.so.{0,40}not found",
        "the loader does not find the driver",
        "install the driver, or mount /usr/local/Ascend/driver into the container; then npu-smi info",
    ),
    _text(
        "dcmi",
        ("dcmi",),
        r"dcmi mod(?:ule|el) initiali[sz]ed? failed",
        "npu-smi does not reach the driver: it is not installed, not mounted, or this user may not use it",
        "install the driver; join its user's group; in a container: mount /dev/davinci*, /dev/davinci_manager and the "
        "driver's directory",
    ),
    _text(
        "GLIBCXX",
        ("glibcxx_", "cxxabi_"),
        r"version [`'](?:GLIBCXX|CXXABI)_[\d.]+' not found",
        "the C++ library of the system or of conda is older than the one that a package was built with",
        "update libstdc++ (conda install -c conda-forge libstdcxx-ng), or put the newer one first in LD_LIBRARY_PATH",
    ),
    _text(
        "static TLS",
        ("static tls block",),
        r"cannot allocate memory in static TLS block",
        "a library was loaded too late for the thread memory that it needs, on aarch64 mostly libgomp",
        "import torch before everything else, or set LD_PRELOAD to the library that the line names",
    ),
    _text(
        "undefined symbol",
        ("undefined symbol",),
        r"undefined symbol\s*:",
        "two libraries do not belong together: torch and torch_npu, or torch's C++ ABI and that of ATB, or CANN",
        _VERSIONS,
        "ATB: source nnal/atb/set_env.sh --cxx_abi=1 (or 0, as torch.compiled_with_cxx11_abi() says)",
    ),
    _text(
        "ASCEND_HOME_PATH",
        ("ascend_home_path",),
        r"ASCEND_HOME_PATH.{0,80}(?:does not exist|not exist|not set|is empty|unset|not found)",
        "the environment does not name a CANN that is there",
        _SET_ENV,
    ),
    _text(
        "CANN's Python packages missing",
        ("no module named",),
        r"No module named '?(?:acl|tbe|te|hccl|opc_tool|auto_tune)(?:'|\b(?!\.py))",
        "CANN's Python packages are not on the path: its set_env.sh was not sourced",
        _SET_ENV,
    ),
    _text(
        "torch_npu not imported",
        ("has no attribute 'npu'", "at start of device string: npu"),
        r"module 'torch' has no attribute 'npu'|at start of device string: npu",
        "torch_npu is not loaded in this process",
        "import torch_npu; find out why `import torch` did not load it: python -m atb_modules.doctor",
    ),
    _code(148049, None, "the path of the operator packages is not set (ASCEND_OPP_PATH)", _SET_ENV),
    _text(
        "numpy 2",
        ("numpy",),
        r"compiled using NumPy 1\.x|numpy\.core\.multiarray failed to import|`?np\.float_?`? was removed"
        r"|module 'numpy' has no attribute",
        "a Python part was written for numpy 1, and numpy 2 is installed",
        "pip install 'numpy<2', or the CANN and torch_npu of a later release",
    ),
    _text(
        "operator binary missing",
        ("cannot find bin of op", "binary_info_config.json", "binary load failed", *_words(561103)),
        rf"cannot find bin of op|binary_info_config\.json|binary load failed|{_number(561103)}",
        "there is no compiled kernel for this operator: the operator package is missing or of another chip, or no "
        "kernel takes this dtype and shape",
        _KERNELS,
        _SHAPES,
    ),
    _code(
        107001,
        "ACL_ERROR_RT_INVALID_DEVICEID",
        "there is no device of that number in this process",
        "compare the number with torch.npu.device_count() and ASCEND_RT_VISIBLE_DEVICES",
    ),
    _code(
        107002,
        "ACL_ERROR_RT_CONTEXT_NULL",
        "no context on this thread: no device was set before the call, or it was reset",
        "call torch.npu.set_device(...) on the thread that computes, before the first tensor",
        "after fork: start workers with the spawn method",
    ),
    _code(
        107003,
        "ACL_ERROR_RT_STREAM_CONTEXT",
        "a stream was used under the context of another device",
        "use a stream on the device that it was made on, inside torch.npu.device(...)",
    ),
    _code(161001, None, "the operator got a null pointer for a tensor that it needs", _SHAPES),
    _code(161002, None, "the operator got a parameter that it does not take", _SHAPES),
    _code(561002, None, "the operator's tiling refused: a shape or an attribute is out of its range", _SHAPES),
    _code(
        507014,
        "ACL_ERROR_RT_AICORE_TIMEOUT",
        "a kernel on the AI cores did not end in time",
        _LOCALISE,
        "look for a kernel that waits for another, or for one far too large",
    ),
    _code(507034, "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT", "a kernel on the vector cores did not end in time", _LOCALISE),
    _code(
        507015,
        "ACL_ERROR_RT_AICORE_EXCEPTION",
        "a kernel on the AI cores failed: an address out of bounds, or lengths and indices that do not fit",
        _LOCALISE,
        "check indices, slots, block tables and cumulative lengths: kernels do not",
    ),
    _code(
        507035,
        "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
        "a kernel on the vector cores failed: an address out of bounds, or indices that do not fit",
        _LOCALISE,
        "check indices, slots and block tables: kernels do not",
    ),
    _code(
        507018,
        "ACL_ERROR_RT_AICPU_EXCEPTION",
        "an operator on the AI CPU failed",
        _LOCALISE,
        "search the log for the operator's name: a fused operator in its place would not run there",
    ),
    _code(
        507899,
        "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
        "the driver met an error of its own",
        "npu-smi info, then the system's log (dmesg): health of the device, other processes on it",
    ),
    _text(
        "out of memory",
        (
            "npu out of memory",
            "200000",
            "0x30d40",
            "207001",
            "0x32899",
            "207018",
            "0x328aa",
            "acl_error_bad_alloc",
            "acl_error_rt_memory_allocation",
        ),
        r"NPU out of memory|\bACL_ERROR_BAD_ALLOC\b|\bACL_ERROR_RT_MEMORY_ALLOCATION\b|"
        rf"{_number(200000)}|{_number(207001)}|{_number(207018)}",
        "the device has no memory left",
        _MEMORY,
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True where memory is in pieces",
    ),
    _code(
        207008,
        None,
        "the device has no stream left",
        "close other processes on the device; make fewer streams",
    ),
    _text(
        "operator compilation failed",
        ("e40021", *_words(500002), "op compile failed"),
        rf"(?<![A-Za-z0-9_])E40021(?![A-Za-z0-9_])|op compile failed|{_number(500002)}",
        "CANN could not compile an operator on the spot",
        "read the first error above it: often a missing Python package or compiler of CANN's operator compiler",
        _KERNELS,
    ),
    _text(
        "initialisation failed",
        (*_words(500001), "eh9999"),
        rf"(?<![A-Za-z0-9_])EH9999(?![A-Za-z0-9_])|{_number(500001)}",
        "CANN could not start: Python packages of its compiler are missing, numpy is too new, or versions do not match",
        _VERSIONS,
        "pip install attrs cython 'numpy<2' decorator sympy cffi pyyaml psutil scipy",
        _PLOG,
    ),
    _module_code("EZ1001", "an operator does not take a dtype or a parameter", _SHAPES),
    _module_code("EZ3002", "the operator is not there for this chip, or not for this dtype", _SHAPES, _KERNELS),
    _module_code(
        "EI0002",
        "a process of a collective operation waited for another that did not come",
        "search the logs of all ranks for the one that failed first; raise HCCL_EXEC_TIMEOUT only for slow ones",
    ),
    _text(
        "torch_npu does not load",
        ("failed to load the backend extension",),
        r"Failed to load the backend extension: torch_npu",
        "`import torch` loads torch_npu, which failed; the error above it says why",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -m atb_modules.doctor",
    ),
    _module_code(
        "E89999",
        "an inner error of CANN; the text behind it says more than the code",
        _PLOG,
        _LOCALISE,
    ),
    _module_code(
        "EZ9999",
        "an inner error of CANN; the first line behind the code says what failed",
        _PLOG,
        _LOCALISE,
    ),
    _text(
        "fall back to CPU",
        ("fall back to run on the cpu", "fallback to cpu"),
        r"fall back to run on the CPU|fallback to cpu",
        "an operator has no NPU kernel and runs on the host, with copies both ways: right, and slow; it is said once "
        "for each operator",
        "the line names the operator: use a fused one in its place, or another dtype",
    ),
)

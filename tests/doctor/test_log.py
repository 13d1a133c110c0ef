"""What logs say: every known error in the words of real logs, numbers that are no codes, and logs of every shape."""

from __future__ import annotations

import io
import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atb_modules.doctor import explain_log
from atb_modules.doctor.known_errors import KNOWN_ERRORS
from atb_modules.doctor.log import _explain, _pieces, explain_lines

#: name -> lines that show it
SHOWN = {
    "libatb.so missing": ["ImportError: libatb.so: cannot open shared object file: No such file or directory"],
    "CANN libraries missing": [
        "ImportError: libhccl.so: cannot open shared object file: No such file or directory",
        "OSError: libascendcl.so: cannot open shared object file: No such file or directory",
        "\tlibge_runner.so => not found",
    ],
    "libascend_hal.so missing": ["ImportError: libascend_hal.so: cannot open shared object file: No such file"],
    "dcmi": [
        "dcmi model initialized failed, because the device is used. ret is -8020",
        "dcmi module initialize failed.",
    ],
    "GLIBCXX": ["ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by x.so)"],
    "static TLS": ["ImportError: /x/libgomp-d22c30c5.so.1.0.0: cannot allocate memory in static TLS block"],
    "undefined symbol": [
        "ImportError: /usr/lib/python3/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN2at4_ops5zeros4callEv"
    ],
    "ASCEND_HOME_PATH": [
        "EnvironmentError: The path ASCEND_HOME_PATH=/usr/local/Ascend does not exist",
        "ASCEND_HOME_PATH is not set",
    ],
    "CANN's Python packages missing": [
        "ModuleNotFoundError: No module named 'tbe'",
        "ModuleNotFoundError: No module named 'acl'",
        "E Exception: No module named te",
    ],
    "torch_npu not imported": [
        "AttributeError: module 'torch' has no attribute 'npu'",
        "RuntimeError: Expected one of cpu, cuda, ipu device type at start of device string: npu",
    ],
    "148049": ["[ERROR] aclInit failed, error code is 148049", "ret = 148049", "retCode is 0x24251."],
    "numpy 2": [
        "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.1.3 as it may crash.",
        "AttributeError: `np.float_` was removed in the NumPy 2.0 release. Use `np.float64` instead.",
    ],
    "operator binary missing": [
        "RuntimeError: call aclnnFusedInferAttentionScoreV2 failed, error code is 561103",
        "Cannot find bin of op FlashAttentionScore, integral key 0/1/|float16/ND/",
        "open binary_info_config.json failed",
        "[EXCEPTION] Kernel binary load failed",
    ],
    "107001": ["aclrtSetDevice failed, error code is 107001", "ACL_ERROR_RT_INVALID_DEVICEID"],
    "107002": ["call aclrtSynchronizeStream failed, error code is 107002", "ret[107002]", "ACL_ERROR_RT_CONTEXT_NULL"],
    "107003": ["error code is 107003"],
    "161001": ["call aclnnAddRmsNorm failed, error code is 161001"],
    "161002": ["aclnnAddRmsNorm fail, ret: 161002", "errorCode=161002,"],
    "561002": ["call aclnnPromptFlashAttention failed, detail:EZ, error code is 561002"],
    "507014": ["runtime result = 507014, reason=[aicore timeout]", "retCode is 0x7bc86"],
    "507034": ["ERR00100 PTA call acl api failed, error code:507034", "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT"],
    "507015": ["RuntimeError: ACL stream synchronize failed, error code:507015", "aclError 507015", "retCode=0x7BC87"],
    "507035": ["RuntimeError: NPU function error: error code is 507035\n", "[Error]: (507035) failed: 507035"],
    "507018": ["rtStreamSynchronize failed with 507018", "error code = 507018!"],
    "507899": ["rtMemcpy failed, retCode is 0x7bffb", "error code is 507899"],
    "out of memory": [
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)",
        "aclrtMalloc failed, error code is 207001",
        "error code: 207018",
        "ret=200000",
    ],
    "207008": ["aclrtCreateStream failed, error code is 207008"],
    "operator compilation failed": ["E40021: Failed to compile Op [Add1].", "op compile failed", "ret: 500002"],
    "initialisation failed": ["EH9999: Inner Error!", "GEInitialize failed, error code is 500001"],
    "EZ1001": ["EZ1001: x1 dtype DT_DOUBLE not in dtype support list"],
    "EZ3002": ["[EZ3002]: Optype [FlashAttention] of Ops kernel is unsupported"],
    "EI0002": ["EI0002: The wait execution of the Notify register times out."],
    "torch_npu does not load": ["RuntimeError: Failed to load the backend extension: torch_npu. You can disable it."],
    "E89999": ["E89999: Inner Error, Please contact support engineer!"],
    "EZ9999": ["EZ9999: Inner Error!"],
    "fall back to CPU": [
        "[W] CAUTION: The operator 'aten::unique' is not currently supported on the NPU backend and will fall back to "
        "run on the CPU. This may have performance implications."
    ],
}


def names(*lines):
    return [cause.name for cause in explain_lines(lines).causes]


@pytest.mark.parametrize("name,line", [(name, line) for name, lines in SHOWN.items() for line in lines])
def test_every_known_error(name, line):
    assert names(line) == [name]
    assert names(line.upper()) == [name] and names(f"2026-01-01 [pid 7] {line} -- ") == [name]


def test_every_error_of_the_table_has_a_line_and_a_next_step():
    assert [error.name for error in KNOWN_ERRORS] == list(SHOWN)
    for error in KNOWN_ERRORS:
        assert error.meaning and error.next_steps and all(word == word.lower() for word in error.words)


@pytest.mark.parametrize("line", [
    "step 107002 of 200000 done",
    "error at step 507035",
    "loss 0.507015 lr 5.07018",
    "error code: 5070351",
    "error code: 1507035",
    "error code: 507035.25",
    "retCode is 0x7bc9bf",
    "barcode: 200000",
    "saved checkpoint-500002/model.safetensors",
    "request id 161001 returned 200",
    "see LEZ9999 and EZ99990",
    "undefined symbols are fine",
    "ModuleNotFoundError: No module named 'ted'",
    "ModuleNotFoundError: No module named 'te.py'",
    "ModuleNotFoundError: No module named 'aclocal'",
    "module 'torch' has no attribute 'npu_format'",
    "loading libhccl.so and libatb.so",
    "export ASCEND_HOME_PATH=/usr/local/Ascend",
    "import numpy as np  # numpy 1 or 2",
    "",
])  # fmt: skip
def test_numbers_and_words_that_mean_nothing(line):
    assert names(line) == []


def test_the_most_specific_cause_comes_first_with_its_first_line():
    lines = ["[W] op will fall back to run on the CPU", "EZ9999: Inner Error!", "ok", "error code is 507035", "x",
             "error code is 507035", "ImportError: x.so: undefined symbol: _Z"]  # fmt: skip
    found = explain_lines(lines, {})
    assert [c.name for c in found.causes] == ["undefined symbol", "507035", "EZ9999", "fall back to CPU"]
    assert [(c.line_number, c.lines) for c in found.causes] == [(7, 1), (4, 2), (2, 1), (1, 1)]
    assert "line 4 (and 1 more): error code is 507035" in str(found)
    assert found.lines_read == 7 and "-> run again with ASCEND_LAUNCH_BLOCKING=1" in str(found)


def test_nothing_known_says_where_to_look_further():
    found = explain_lines(["all is well"], {})
    assert not found.found and "~/ascend/log/debug/plog" in str(found) and "ASCEND_LAUNCH_BLOCKING=1" in str(found)
    found = explain_lines([], {"ASCEND_PROCESS_LOG_PATH": "/logs"})
    assert "/logs/debug/plog" in str(found) and found.as_dict()["lines_read"] == 0


@pytest.mark.parametrize("encoding", ["utf-8", "gbk", "latin-1"])
def test_logs_in_any_encoding(tmp_path, encoding):
    log = tmp_path / "log"
    words = "错误" if encoding != "latin-1" else "Größe"
    log.write_bytes(
        f"{words} a\r\n{words} error code is 507035 {words}\r\n".encode(encoding) + b"\xff\xfe\x00\x1b[31m\n"
    )
    (cause,) = explain_log(log).causes
    assert cause.name == "507035" and cause.line_number == 2 and "error code is 507035" in cause.line


def test_control_characters_do_not_reach_the_terminal():
    (cause,) = explain_lines(["\x1b[2J\x07error code is 507035\x00"]).causes
    assert cause.line.isprintable()


def test_a_line_without_end_is_read_in_pieces(tmp_path):
    """The error may lie across the border of two pieces."""
    rng = random.Random(4)
    for place in (0, 262_100, 262_138, 262_144, 524_280, *(rng.randrange(800_000) for _ in range(8))):
        text = b"x" * place + b" error code is 507035 " + b"y" * 350_000
        (cause,) = explain_log(io.BytesIO(b"first\n" + text + b"\nEZ9999: Inner Error!\n")).causes[:1]
        assert (cause.name, cause.line_number, cause.lines) == ("507035", 2, 1)
        assert "error code is 507035" in cause.line and len(cause.line) <= 300
        last = explain_log(io.BytesIO(b"first\n" + text + b"\nEZ9999: Inner Error!\n"))
        assert last.causes[1].line_number == 3 and last.lines_read == 3


PARTS = [line for lines in SHOWN.values() for line in lines] + ["nothing here", "", "step 507035", "x" * 90, "误"]


@given(lines=st.lists(st.sampled_from(PARTS), max_size=12), block=st.integers(1, 400), ended=st.booleans())
def test_the_size_of_a_block_changes_nothing(lines, block, ended):
    lines = [line.strip() for line in lines]
    log = "\n".join(lines).encode() + b"\n" * (ended and bool(lines))
    whole, streamed = explain_lines(log.decode().splitlines(), {}), _explain(_pieces(io.BytesIO(log), block), {})
    assert streamed.lines_read == whole.lines_read
    assert [(c.name, c.line_number, c.lines) for c in streamed.causes] == [
        (c.name, c.line_number, c.lines) for c in whole.causes
    ]


def test_lines_made_to_be_slow():
    for line in ("error code is " * 30_000 + "507035x", "libatb.so" * 30_000, "code:" * 60_000 + " 161001x"):
        start = time.perf_counter()
        explain_lines([line])
        assert time.perf_counter() - start < 5.0


def test_huge_logs_are_streamed(tmp_path):
    log = tmp_path / "huge"
    with log.open("wb") as file:
        for _ in range(400):
            file.write(b"2026-01-01 00:00:00 [INFO] step done, loss 1.25\n" * 1000)
        file.write(b"z" * 30_000_000)
        file.write(b"\nret=161002\n")
    tracemalloc.start()
    try:
        found = explain_log(log)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [c.name for c in found.causes] == ["161002"] and found.causes[0].line_number == 400_002
    assert peak < 8_000_000


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        explain_log(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        explain_log(tmp_path)
    for wrong in (7, io.StringIO("text"), None):
        with pytest.raises(TypeError, match="log is .*; allowed: a path or a binary stream"):
            explain_log(wrong)

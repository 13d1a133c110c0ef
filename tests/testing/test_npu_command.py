"""The command line of the emulated NPU: what it refuses, it names; a traceback is for faults of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atb_modules.testing.npu.__main__ import main

ALLOWED = "ascend910b1, ascend910b2, ascend910b3, ascend910b4, ascend910_93, ascend310p, ascend950"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foo"], f"soc is 'foo'; allowed: {ALLOWED}"),
        (["ascend910b1", "--devices", "17"], "devices is 17; allowed: 0 to 16"),
        (["--devices", "-1"], "devices is -1; allowed: 0 to 16"),
        (["--devices", "two"], "argument --devices: invalid int value: 'two'"),
        (["ascend910b1", "operators"], "unrecognized arguments: operators"),
        (["ascend910b1"], "no torch_npu in "),
    ],
)
def test_what_cannot_be_served_is_a_usage_error(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ATB_TORCH_NPU_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert shown.err.startswith("usage: python -m atb_modules.testing.npu ")
    assert f"python -m atb_modules.testing.npu: error: {message}" in shown.err
    assert not shown.out


def test_an_unknown_word_in_a_process_of_its_own():
    command = [sys.executable, "-m", "atb_modules.testing.npu", "foo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"python -m atb_modules.testing.npu: error: soc is 'foo'; allowed: {ALLOWED}"
    )

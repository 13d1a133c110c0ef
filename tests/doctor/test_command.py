"""The command line in processes of its own: exit statuses, JSON, logs from files and from standard input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from atb_modules.doctor.__main__ import main


def run(*arguments, **options):
    command = [sys.executable, "-m", "atb_modules.doctor", *arguments]
    return subprocess.run(command, capture_output=True, timeout=120, **options)


def test_the_report():
    done = run("--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ok"] is True and found["verdict"] in ("unknown", "compatible")
    assert {check["status"] for check in found["checked"]} == {"agrees", "cannot", "not run"}
    assert found["software"]["torch"] and found["native"]["problem"] is None
    assert isinstance(found["variables"], dict)


def test_a_log_from_standard_input_in_a_terminal_without_unicode():
    log = "错误 error code is 507035\n".encode()
    done = run("--explain", "-", input=log, env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert done.returncode == 0 and b"507035: a kernel on the vector cores failed" in done.stdout
    assert done.stdout.isascii() and b"??" in done.stdout


def test_logs(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("hello\nEZ9999: Inner Error!\n")
    assert main(["--explain", str(log)]) == 0
    assert "line 2: EZ9999: Inner Error!" in capsys.readouterr().out
    assert main(["--explain", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"][0]["line_number"] == 2
    log.write_text("hello\n")
    assert main(["--explain", str(log)]) == 1
    assert "1 lines read, none of which is a known error" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--explain"], ["--no-kernels"]])
def test_the_environment_alone(capsys, monkeypatch, arguments):
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert main(arguments) == 0
    assert "kernels were not run" in capsys.readouterr().out
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere/at/all")
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "NOT FINE" in shown and "!!ASCEND_HOME_PATH: ASCEND_HOME_PATH is '/nowhere/at/all'" in shown


def test_a_plan(capsys):
    assert main(["--no-kernels", "--soc", "Ascend910_9391"]) == 0
    assert "NPU kernels on ascend910_93, by their documented rules" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--explain", "/nowhere/at/all.log"], "/nowhere/at/all.log cannot be read: No such file or directory"),
        (["--explain", "/"], "/ cannot be read: Is a directory"),
        (["--soc", "h100"], "--soc: soc is 'h100'; allowed: ascend910b1"),
        (["--emulate", "h100"], "--emulate: soc is 'h100'"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_reader_that_leaves_early(tmp_path):
    """Nobody is shown a traceback for `... | head -1`."""
    log = tmp_path / "log"
    log.write_text("EZ9999: Inner Error!\n")
    command = [sys.executable, "-m", "atb_modules.doctor", "--explain", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_emulating_without_torch_npu(tmp_path):
    done = run("--emulate", "ascend910b1", env={"ATB_TORCH_NPU_DIR": str(tmp_path), "PATH": ""})
    assert done.returncode == 2 and b"--emulate: no torch_npu in" in done.stderr

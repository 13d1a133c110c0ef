"""The doctor on faked installations: versions and where they were read, verdicts, next steps, and damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atb_modules.doctor import report
from atb_modules.kernels.ascend import ascendc

from .installations import Installation

ABI = int(torch.compiled_with_cxx11_abi())


@pytest.fixture(autouse=True)
def ascend_c(tmp_path, monkeypatch):
    """Our Ascend C kernels, as if they were built."""
    library = tmp_path / "libatb_ascend.so"
    library.touch()
    monkeypatch.setattr(ascendc, "LIBRARY", library)
    return library


def look(machine, **options):
    return report(places=machine.places(**options), kernels=False)


def levels(found, subject):
    return [finding.level.value for finding in found.findings if finding.subject == subject]


def finding(found, subject):
    (only,) = [finding for finding in found.findings if finding.subject == subject]
    return only


def healthy(machine):
    machine.cann("8.5.0").torch_npu("2.9.0.post1+gitabc", "numpy", "torch==2.9.1").driver().npu_smi().atb(ABI, "8.5.0")
    machine.package("numpy", "1.26.4")
    return machine


def test_a_healthy_installation(machine):
    healthy(machine)
    machine.torch = "2.9.1"
    found = look(machine)
    software = found.software
    assert found.ok and found.findings == ()
    assert software.torch_npu.value == "2.9.0.post1+gitabc" and software.torch_pin == "2.9.1"
    assert software.cann.value == "8.5.0" and software.cann.source.endswith("aarch64-linux/ascend_toolkit_install.info")
    assert software.driver.value == "24.1.rc3" and software.driver.source.endswith("driver/version.info")
    assert software.firmware.value == "7.5.0.3.220"
    assert software.soc.value == "ascend910b1" and "2 chip(s)" in software.soc.source
    assert (software.atb.value, software.atb_abi, software.torch_abi) == ("8.5.0", ABI, ABI)
    assert dict(found.variables)["LD_LIBRARY_PATH"] == f"{machine.cann_home}/lib64"
    assert found.verdict == "unknown"  # 2.9.0.post1 is in no row


def test_a_pair_of_the_table_is_compatible(machine):
    machine.cann("8.5.0").torch_npu("2.9.0", "torch==2.9.0").driver()
    machine.torch = "2.9.0"
    found = look(machine)
    assert found.verdict == "compatible" and found.ok and found.findings == ()
    assert "Ascend: compatible" in str(found)


def test_our_ascend_c_kernels(machine, ascend_c):
    assert look(healthy(machine)).software.ascend_c.value == "built"
    ascend_c.unlink()
    found = look(machine)
    assert found.ok and found.software.ascend_c.value is None
    assert finding(found, "Ascend C").next_step.startswith("cmake -S ")


def test_nothing_is_here(machine, ascend_c):
    ascend_c.unlink()
    found = look(machine)
    assert found.ok and found.verdict == "unknown" and found.findings == () and found.variables == ()
    assert "not here     numpy, torch_npu, CANN, ATB, Ascend C, driver, firmware, SoC" in str(found)


@pytest.mark.parametrize("torch_version,wrong", [("2.9.1", False), ("2.9.0+cpu", False), ("2.10.0", True)])
def test_torch_npu_needs_torch_of_its_minor_version(machine, torch_version, wrong):
    machine.cann("8.5.0").torch_npu("2.9.0.post3").driver()
    machine.torch = torch_version
    found = look(machine)
    assert levels(found, "torch") == ["mismatch"] * wrong
    assert found.ok is not wrong and (found.verdict == "mismatched") is wrong
    if wrong:
        assert finding(found, "torch").text == "torch_npu 2.9.0.post3 needs torch 2.9.*, here is torch 2.10.0"


@pytest.mark.parametrize("torch_version,pin,held", [
    ("2.14.1", "torch==2.14.0.*", False),
    ("2.14.0", "torch==2.14.0.*", True),
    ("2.14.0.post1", "torch (==2.14.0.*)", True),
    ("2.14.10", "torch==2.14.1", False),
    ("2.14.1+cpu", "torch==2.14.1+cpu", True),
])  # fmt: skip
def test_the_pin_of_torch_npu(machine, torch_version, pin, held):
    machine.cann("9.1.0").torch_npu("2.14.0", "torchvision==0.1", pin).driver()
    machine.torch = torch_version
    found = look(machine)
    assert levels(found, "torch") == ["warning"] * (not held)
    assert found.ok


def test_versions_that_cannot_be_compared(machine):
    machine.cann("8.5.0").torch_npu("main").driver()
    assert levels(look(machine), "torch") == ["warning"]


def test_set_env_was_not_sourced(machine):
    machine.cann("8.5.0", sourced=False).torch_npu("2.9.0").driver()
    script = machine.write(machine.cann_home.parent / "set_env.sh", "")
    found = look(machine)
    assert not found.ok and found.verdict == "mismatched"
    assert "its set_env.sh was not sourced" in finding(found, "environment").text
    assert finding(found, "environment").next_step == f"source {script}"
    assert found.software.cann.value == "8.5.0"


def test_without_torch_npu_an_unsourced_cann_is_but_a_note(machine):
    machine.cann("8.5.0", sourced=False)
    found = look(machine)
    assert found.ok and levels(found, "environment") == ["note"]


def test_torch_npu_without_cann(machine):
    machine.torch_npu("2.9.0").driver()
    found = look(machine)
    assert finding(found, "CANN").level == "mismatch" and found.verdict == "mismatched"


@pytest.mark.parametrize("name", ["ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ATB_HOME_PATH"])
@pytest.mark.parametrize("value", ["/nowhere/at/all", ""])
def test_a_variable_that_names_no_directory(machine, name, value):
    healthy(machine).environ[name] = value
    found = look(machine)
    assert not found.ok and "mismatch" in levels(found, name)


def test_the_path_of_operators_is_not_set(machine):
    del healthy(machine).environ["ASCEND_OPP_PATH"]
    found = look(machine)
    assert "148049" in finding(found, "environment").text and not found.ok


def test_libraries_are_not_on_the_path(machine):
    healthy(machine).environ["LD_LIBRARY_PATH"] = "/usr/lib"
    assert levels(look(machine), "LD_LIBRARY_PATH") == ["mismatch"]
    machine.environ["LD_LIBRARY_PATH"] = f"/opt/ascend-toolkit/8.0.0/lib64:{machine.cann_home}/lib64"
    found = look(machine)
    assert "names /opt/ascend-toolkit/8.0.0/lib64 before" in finding(found, "LD_LIBRARY_PATH").text and found.ok


def test_a_link_to_the_directory_of_cann_is_as_good(machine):
    healthy(machine)
    link = machine.root / "cann"
    link.symlink_to(machine.cann_home)
    machine.environ["LD_LIBRARY_PATH"] = f"{link}/lib64"
    assert look(machine).findings == ()


def test_atb_of_the_other_abi(machine):
    machine.cann("8.5.0").torch_npu("2.9.0").driver().atb(1 - ABI, "8.5.0")
    found = look(machine)
    assert finding(found, "ABI").level == "mismatch" and f"--cxx_abi={ABI}" in finding(found, "ABI").next_step
    assert found.software.atb_abi == 1 - ABI


def test_atb_of_another_cann_and_not_sourced(machine):
    machine.cann("8.5.0").torch_npu("2.9.0").driver().atb(ABI, "8.3.RC1")
    assert finding(look(machine), "ATB").text == "ATB is of CANN 8.3.RC1, CANN is 8.5.0"
    machine.environ.pop("ATB_HOME_PATH")
    assert levels(look(machine), "ATB") == ["note", "warning"]


@pytest.mark.parametrize("cann,numpy,warned", [
    ("8.2.RC1", "2.1.3", True),
    ("8.2.RC1", "1.26.4", False),
    ("8.5.0", "2.1.3", False),
    ("10.0.0", "2.1.3", False),
])  # fmt: skip
def test_numpy_2_beside_an_old_cann(machine, cann, numpy, warned):
    machine.cann(cann).package("numpy", numpy)
    found = look(machine)
    assert levels(found, "numpy") == ["warning"] * warned and found.ok
    assert found.software.numpy.value == numpy


def test_switches_are_explained(machine):
    machine.environ |= {
        "ASCEND_LAUNCH_BLOCKING": "1",
        "TASK_QUEUE_ENABLE": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "SECRET": "x",
    }
    found = look(machine)
    assert {f.subject for f in found.findings} == {*machine.environ} - {"SECRET", "PATH"}
    assert set(dict(found.variables)) == {*machine.environ} - {"SECRET", "PATH"} and found.ok


def test_torch_npu_that_does_not_import_is_explained(machine):
    code = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"
    machine.cann("8.5.0").torch_npu("2.9.0", code=code).driver()
    found = look(machine)
    failed = finding(found, "import torch_npu")
    assert failed.level == "mismatch" and failed.text.endswith("No such file or directory")
    assert "source CANN's set_env.sh" in failed.next_step


def test_torch_npu_that_fails_in_an_unknown_way_or_hangs(machine):
    machine.cann("8.5.0").torch_npu("2.9.0", code="import os; os._exit(3)").driver()
    assert finding(look(machine), "import torch_npu").text == "it fails: exit status 3"
    machine.write(machine.packages / "torch_npu/__init__.py", "import time; time.sleep(60)")
    found = look(machine, seconds=0.5)
    assert levels(found, "import torch_npu") == ["warning"] and found.ok


def test_the_driver_is_reported_and_not_judged(machine):
    machine.cann("8.5.0").torch_npu("2.9.0").driver("1.0.0")
    assert look(machine).ok and look(machine).software.driver.value == "1.0.0"


def test_no_driver_for_torch_npu(machine):
    machine.cann("8.5.0").torch_npu("2.9.0")
    assert levels(look(machine), "driver") == ["warning"]


@pytest.mark.parametrize("chip,name", [("910B4", "ascend910b4"), ("310P3", "ascend310p"), ("Ascend910", "Ascend910")])
def test_chips_as_npu_smi_names_them(machine, chip, name):
    machine.npu_smi(chip=chip)
    assert look(machine).software.soc.value == name
    assert look(machine).software.driver.value == "24.1.rc3"  # no version.info: npu-smi tells


@pytest.mark.parametrize(
    "script,said",
    [
        ("import sys; print('dcmi model initialized failed'); sys.exit(255)", "dcmi model initialized failed"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe garbage')", "lists no chip"),
        ("import time; time.sleep(60)", "did not answer in 0.5 s"),
    ],
)
def test_npu_smi_that_does_not_work(machine, script, said):
    machine.npu_smi(script)
    found = look(machine, seconds=0.5)
    assert found.software.soc.value is None and said in finding(found, "SoC").text and found.ok


def test_npu_smi_that_is_no_program(machine):
    machine.npu_smi()
    (machine.root / "bin/npu-smi").write_bytes(b"\x7fELF nothing")
    assert "cannot be run" in look(machine).software.soc.source


@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff\xfe\x80", b"version=\n", b"version", "version=八.五\n".encode("gbk"), b"=" * 70000]
)
def test_garbled_version_files(machine, content):
    machine.cann(None).torch_npu("2.9.0")
    machine.write(machine.cann_home / "ascend_toolkit_install.info", content)
    machine.write("usr/local/Ascend/driver/version.info", content)
    found = look(machine)
    assert found.software.cann.value is None and found.verdict == "unknown" and found.ok
    assert set(levels(found, "CANN")) == {"warning"} and "warning" in levels(found, "driver")
    assert "unknown" in str(found)


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=80) | st.binary(max_size=20).map(lambda tail: b"version=8.5" + tail))
def test_no_file_makes_the_doctor_fall(tmp_path_factory, content):
    machine = Installation(tmp_path_factory.mktemp("root") / "root").cann(None).atb(ABI)
    for name in ("ascend_toolkit_install.info", "runtime/version.info"):
        machine.write(machine.cann_home / name, content)
    machine.write("usr/local/Ascend/firmware/version.info", content)
    machine.write("usr/local/Ascend/nnal/atb/latest/version.info", content)
    found = look(machine)
    assert found.ok and str(found) and json.dumps(found.as_dict(), allow_nan=False)
    assert found.software.cann.value is not None or levels(found, "CANN")


def test_the_version_of_a_part_tells_where_no_installation_does(machine):
    machine.cann(None)
    machine.write(machine.cann_home / "ascend_toolkit_install.info", "nothing\n")
    machine.write(machine.cann_home / "compiler/version.info", "Version=7.6.0.1.220\nversion_dir=8.2.RC1\n")
    software = look(machine).software
    assert software.cann.value == "8.2.RC1" and software.cann.source.endswith("compiler/version.info")


def test_parts_of_different_versions(machine):
    machine.cann("8.5.0")
    machine.write(machine.cann_home / "ascend_nnrt_install.info", "version=8.3.RC1\n")
    found = look(machine)
    assert found.software.cann.value == "8.5.0"  # the toolkit's counts
    assert "8.5.0 (ascend_toolkit_install.info), 8.3.RC1 (ascend_nnrt_install.info)" in finding(found, "CANN").text


def test_files_that_cannot_be_read(machine):
    """A file whose reading fails whoever asks, a directory and a link that leads to itself in the place of others."""
    machine.cann(None)
    (machine.cann_home / "ascend_toolkit_install.info").symlink_to("/proc/self/mem")
    (machine.cann_home / "ascend_nnae_install.info").mkdir()
    (machine.cann_home / "ascend_loop_install.info").symlink_to(machine.cann_home / "ascend_loop_install.info")
    (machine.root / "usr/local/Ascend/driver/version.info").mkdir(parents=True)
    found = look(machine)
    assert any("cannot be read: Input/output error" in f.text for f in found.findings)
    assert "cannot be read: Is a directory" in finding(found, "driver").text and found.ok


def test_files_that_may_not_be_read(machine, monkeypatch):
    """As root nothing is forbidden, so the system's answer is put in its place."""
    healthy(machine)
    real = Path.open

    def refuse(path, *args, **kwargs):
        if path.suffix == ".info":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    found = look(machine)
    assert found.software.cann.value is None and found.software.driver.value == "24.1.rc3"  # npu-smi tells
    assert {f.subject for f in found.findings if "Permission denied" in f.text} == {"CANN", "ATB", "driver", "firmware"}


def test_a_directory_that_may_not_be_entered(machine, monkeypatch):
    healthy(machine)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = look(machine)
    assert "no directory that can be read" in finding(found, "ASCEND_HOME_PATH").text
    assert found.software.cann_home is None


def test_broken_metadata_of_torch_npu(machine):
    machine.write(machine.packages / "torch_npu-2.9.0.dist-info/METADATA", b"\xff\xfe\x00nothing")
    machine.write(machine.packages / "torch_npu-2.8.0.dist-info/RECORD", "")
    assert look(machine).software.torch_npu.value is None


def test_two_torch_npus_side_by_side(machine):
    machine.cann("8.5.0").torch_npu("2.9.0").driver().package("torch_npu", "2.8.0")
    assert "installed side by side" in finding(look(machine), "torch_npu").text


def test_nothing_is_written(machine):
    healthy(machine)
    before = sorted(machine.root.rglob("*"))
    look(machine)
    after = [path for path in sorted(machine.root.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before

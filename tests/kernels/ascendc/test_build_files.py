"""The CMake file on a faked CANN, and the tables that C++ keeps of what Python knows."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atb_modules.kernels import registry
from atb_modules.kernels.ascend import ascendc
from atb_modules.kernels.ascend.ascendc import autograd, load, loaded
from atb_modules.kernels.ascend.socs import SOCS
from atb_modules.testing.ascendc.build import arch_option, kernel_entries
from atb_modules.testing.ascendc.kernels import ASCENDC, RESERVED_UB

#: stands for CANN's functions: one object library in place of the kernels, what it was given in a file
FAKE_CANN = """
function(ascendc_library name type)
  file(WRITE ${CMAKE_BINARY_DIR}/kernels.txt "${SOC_VERSION};${RUN_MODE};${ARGN}")
  file(WRITE ${CMAKE_BINARY_DIR}/nothing.cpp "")
  add_library(${name} ${type} ${CMAKE_BINARY_DIR}/nothing.cpp)
endfunction()
function(ascendc_include_directories)
endfunction()
function(ascendc_compile_definitions name)
  file(WRITE ${CMAKE_BINARY_DIR}/definitions.txt "${ARGN}")
endfunction()
"""


@pytest.fixture
def cann(tmp_path):
    folder = tmp_path / "cann" / "compiler" / "tikcpp" / "ascendc_kernel_cmake"
    folder.mkdir(parents=True)
    (folder / "ascendc.cmake").write_text(FAKE_CANN)
    return tmp_path / "cann"


def configure(tmp_path, cann, *options, path=None):
    """The configure step; (return code, output, build directory)."""
    build = tmp_path / "build"
    environment = {key: value for key, value in os.environ.items() if key != "ASCEND_HOME_PATH"}
    if cann is not None:
        environment["ASCEND_HOME_PATH"] = str(cann)
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    packages = [f"-D{package}_dir={tmp_path}" for package in ("torch", "torch_npu")]
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{environment['PATH']}")
    assert cmake, "the test needs CMake, on the PATH or beside Python (pip install cmake)"
    command = [cmake, "-S", str(ASCENDC), "-B", str(build), *packages, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr, build


def npu_smi(tmp_path, command):
    """A folder with an npu-smi that runs ``command``."""
    tool = tmp_path / "bin" / "npu-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{command}\n")
    tool.chmod(0o755)
    return tool.parent


def test_every_kernel_is_built_and_its_launcher_included(tmp_path, cann):
    code, output, build = configure(tmp_path, cann, "-DATB_SOC=Ascend910B1")
    assert code == 0, output
    soc, mode, *sources = (build / "kernels.txt").read_text().split(";")
    assert (soc, mode) == ("Ascend910B1", "npu")
    names = {Path(source).name for source in sources}
    assert names == {path.name for path in ASCENDC.glob("*.cpp") if not path.name.startswith("binding")}
    entries = {entry for name in names for entry in kernel_entries((ASCENDC / name).read_text())}
    included = set(re.findall(r"aclrtlaunch_(\w+)\.h", (build / "atb_launchers.h").read_text()))
    assert included == entries and len(entries) >= 18


def test_310p_has_neither_bfloat16_nor_mixed_kernels(tmp_path, cann):
    code, output, build = configure(tmp_path, cann, "-DATB_SOC=Ascend310P3")
    assert code == 0, output
    assert "ATB_NO_BFLOAT16" in (build / "definitions.txt").read_text()
    launchers = (build / "atb_launchers.h").read_text()
    assert "bfloat16" not in launchers and "aclrtlaunch_atb_rms_norm_half.h" in launchers
    for name in ("paged_decode", "norm_matmul", "flash_attention"):
        assert name not in launchers and name not in (build / "kernels.txt").read_text()


def test_kernels_of_950_are_compiled_as_the_emulated_ones(tmp_path, cann):
    code, output, build = configure(tmp_path, cann, "-DATB_SOC=Ascend950PR_9599")
    assert code == 0, output
    arch, *options = arch_option("KERNEL_TYPE_MIX_AIC_1_2", 3510)
    assert arch == "-D__NPU_ARCH__=3510"  # the device compiler's own
    assert [f"-D{word}" for word in (build / "definitions.txt").read_text().split(";")[1:]] == options
    assert "norm_matmul_bfloat16" in (build / "atb_launchers.h").read_text()
    assert arch_option("KERNEL_TYPE_MIX_AIC_1_2", 2201) == ("-D__NPU_ARCH__=2201",)


@pytest.mark.parametrize(
    ("line", "soc"),
    [("| 0     910B3               | OK            |", "Ascend910B3"), ("| 2     310P3      | OK |", "Ascend310P3")],
)
def test_the_soc_is_asked_of_npu_smi(tmp_path, cann, line, soc):
    code, output, build = configure(tmp_path, cann, path=npu_smi(tmp_path, f"echo '{line}'"))
    assert code == 0, output
    assert (build / "kernels.txt").read_text().startswith(f"{soc};")


def test_what_is_missing_is_named(tmp_path, cann):
    tool = npu_smi(tmp_path, "exit 1")
    for home, options, text in (
        (None, [], "ASCEND_HOME_PATH is not set"),
        (cann, [], "give the SoC"),
        (tmp_path, ["-DATB_SOC=Ascend910B1"], "has no ascendc.cmake"),
    ):
        shutil.rmtree(tmp_path / "build", ignore_errors=True)
        code, output, _ = configure(tmp_path, home, *options, path=tool)
        assert code != 0 and text in " ".join(output.split())


def test_the_table_of_socs_is_the_one_of_python():
    text = (ASCENDC / "tiling" / "soc_table.h").read_text().replace("kAtbKiB", "1024")
    rows = re.findall(r"\{\"(\w+)\",\s*\{([^}]*)\},([^}]*)\}", text)
    table = {
        name: [math.prod(map(int, value.split("*"))) for value in f"{first},{rest}".split(",")]
        for name, first, rest in rows
    }
    assert table == {
        name: [
            soc.ub, soc.vector_cores, soc.cube_cores, soc.bfloat16, soc.arch != "dav-2002",
            soc.l1, soc.l0a, soc.l0b, soc.l0c, soc.npu_arch,
        ]
        for name, soc in SOCS.items()
    }  # fmt: skip


def test_the_reserve_of_the_unified_buffer_is_the_one_of_python():
    text = (ASCENDC / "tiling" / "soc.h").read_text()
    assert re.search(r"kAtbReservedUb = (\d+)", text)[1] == str(RESERVED_UB)


def test_without_the_library_there_are_no_ops():
    assert not load() and not loaded()
    with pytest.raises(OSError, match="missing.so"):
        load(ASCENDC / "missing.so")


def test_choices_made_before_the_library_was_loaded_are_forgotten(monkeypatch):
    forgotten = []
    monkeypatch.setattr(ascendc, "_LOADED", [])
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(autograd, "register", lambda: None)
    monkeypatch.setattr(registry, "forget_choices", lambda: forgotten.append(loaded()))
    assert load("any.so") and load("any.so")
    assert forgotten == [True]

"""Booting: what it needs, what it says, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atb_modules.testing import build_cache
from atb_modules.testing.npu import BootError, boot, booted, stubs, wheel
from atb_modules.testing.npu import boot as boot_function


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_the_same_boot_twice_is_one_boot(booted_npu):
    assert boot("ascend910b1") is booted_npu is booted()
    assert boot_function("Ascend910B1", 1) is booted_npu


@pytest.mark.parametrize("soc, devices", [("ascend310p", 1), ("ascend910b1", 2)])
def test_a_process_has_one_soc(soc, devices):
    with pytest.raises(BootError, match="reads the SoC once, so start another process"):
        boot(soc, devices)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="soc is 'ascend1'; allowed: ascend910b1"):
        boot("ascend1")
    with pytest.raises(ValueError, match="devices is -1; allowed: 0 to 16"):
        boot(devices=-1)
    with pytest.raises(TypeError, match="soc is int"):
        boot(3)


def test_a_missing_wheel_is_named_with_its_cure(tmp_path, monkeypatch):
    with pytest.raises(BootError, match=f"no torch_npu in {tmp_path}.*pip install --no-deps --target {tmp_path}"):
        wheel.find_wheel(tmp_path)
    monkeypatch.setenv("ATB_TORCH_NPU_DIR", str(tmp_path))
    with pytest.raises(BootError, match="no torch_npu in"):
        wheel.find_wheel()
    monkeypatch.delenv("ATB_TORCH_NPU_DIR")
    assert wheel.default_directory().parent.samefile(sys.prefix)


def test_a_missing_compiler_is_named(booted_npu, monkeypatch):
    def none(compiler="g++"):
        raise RuntimeError("g++ does not run")

    monkeypatch.setattr(stubs, "compiler_version", none)
    with pytest.raises(BootError, match="g\\+\\+ does not run; install g\\+\\+ and binutils"):
        stubs.build_stubs(booted_npu.directory, booted_npu.stubs)


def test_another_accelerator_is_refused():
    code = (
        "import torch; torch.accelerator.is_available = lambda: True\n"
        "torch.accelerator.current_accelerator = lambda: torch.device('cuda')\n"
        "from atb_modules.testing.npu import boot; boot()"
    )
    done = run("-c", code)
    assert done.returncode and "BootError: the accelerator of this process is cuda; torch allows one" in done.stderr


def test_a_wheel_that_does_not_import_is_a_boot_error(tmp_path, booted_npu):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "lib").symlink_to(booted_npu.directory / "torch_npu" / "lib")
    (package / "version.py").write_text("__version__ = '9'")
    (package / "__init__.py").write_text("raise OSError('libnothing.so: cannot open')")
    code = "import sys; from atb_modules.testing.npu import boot; boot(torch_npu_dir=sys.argv[1])"
    done = run("-c", code, str(tmp_path))
    assert done.returncode and "does not import on the stubs: libnothing.so: cannot open" in done.stderr


def test_files_of_the_current_directory_are_left_alone(tmp_path, booted_npu):
    """torch_npu walks it for CANN's version where ASCEND_HOME_PATH is not set; the wheel may be named from it, too."""
    (tmp_path / "ascend_other_install.info").write_bytes(b"\xeb\xff")
    (tmp_path / "wheel").symlink_to(booted_npu.directory)
    code = (
        f"import os; os.chdir({str(tmp_path)!r}); from atb_modules.testing.npu import boot; what = boot()\n"
        f"assert os.getcwd() == {str(tmp_path)!r}; import torch_npu.utils.serialization\n"
        "print(what.directory, torch.version.cann)"
    )
    done = run("-c", "import torch; " + code, ATB_TORCH_NPU_DIR="wheel")
    assert done.stdout.split() == [str(tmp_path / "wheel"), "not", "known"], done.stderr


def test_what_booted_is_printed():
    done = run("-m", "atb_modules.testing.npu", "ascend910_93", "--devices", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("emulated: nothing below runs on an NPU")
    assert "SoC         Ascend910_9391 (ascend910_93), 2 device(s)" in done.stdout


def test_two_devices():
    code = """
import torch
from atb_modules.testing.npu import EmulatedNPU, OperatorError, boot
boot(devices=2)
with EmulatedNPU() as emulated:
    x = torch.arange(4.0).to("npu:1")
    y = (x + 1).to("npu:0")
    assert x.device.index == 1 and y.device.index == 0 and y.tolist() == [1, 2, 3, 4]
    assert torch.ones(2, device="npu:1").device.index == 1
    try:
        torch.ops.npu.npu_rms_norm(x[None], y)
    except OperatorError as error:
        print(error)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "tensors lie on several devices: input on npu:1, gamma on npu:0" in done.stdout


def test_stubs_are_built_once(booted_npu, monkeypatch):
    def never(*_):
        raise AssertionError("built again")

    monkeypatch.setattr(stubs, "_build", never)
    libraries = booted_npu.stubs.parent / booted_npu.stubs.name
    torch_libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
    assert stubs.build_stubs(booted_npu.directory, type(libraries)(torch_libraries)) == booted_npu.stubs
    assert booted_npu.stubs.parent == build_cache.cache_root()


def test_the_devices_are_there(booted_npu):
    assert torch.npu.device_count() == 1 and torch.npu.is_available()
    assert torch.npu.get_device_name(0) == "Ascend910B1"
    assert torch.npu.mem_get_info(0)[1] == booted_npu.soc.hbm


def test_memory_moves_without_a_kernel():
    x = torch.arange(12.0).view(3, 4)
    there = x.to("npu:0")
    assert there.device.type == "npu" and torch.equal(there.cpu(), x)
    assert repr(there[:1, :2]) == "tensor([[0., 1.]], device='npu:0')"


def test_an_operator_without_the_mode_names_itself(booted_npu):
    x = torch.zeros(3).to("npu:0")
    with pytest.raises(RuntimeError, match="aclnnAdds"):
        x + 1
    assert booted_npu.unanswered() == "aclnnAdds"


def test_schemas_are_the_wheels_own():
    schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(("npu::", "atb::"))}
    assert len(schemas) > 400
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'pre_tokens'"):
        torch.ops.npu.npu_fusion_attention(*[torch.ones(1, 1, 1, 8)] * 3, 1, "BNSD", pre_tokens=3)
    with pytest.raises(RuntimeError, match="Expected a value of type 'str'"):
        torch.ops.npu.npu_fusion_attention(*[torch.ones(1, 1, 1, 8)] * 3, 1, 2)


def test_the_readmes_example_runs():
    """The first example and that of the emulated NPU, in a process of their own."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (emulated,) = (example for example in examples if "EmulatedNPU" in example)
    check = "assert torch.allclose(y, want, atol=1e-5)\n"
    done = run("-c", f"{examples[0]}\nwant = layer(x)\n{emulated}{check}")
    assert done.returncode == 0, done.stderr
    assert "npu::npu_fusion_attention" in done.stdout

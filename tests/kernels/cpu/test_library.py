"""The native library as a guest in the process: instruction sets, threads, forks, repeatability, sanitizers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atb_modules.kernels.cpu import library

OPS = torch.ops.atb_modules
ROOT = Path(__file__).parents[3]


def library_path():
    return library.get()._name


def run_all():
    """One call of the kernels that start threads, on fixed inputs."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn((1, 4, 256, 64), generator=g), torch.randn((1, 2, 256, 64), generator=g)
    x, w = torch.randn((64, 1024), generator=g), torch.randn((256, 1024), generator=g)
    pages = torch.randn((20, 2, 16, 64), generator=g)
    table, cu = torch.arange(20, dtype=torch.int32)[None], torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.tensor([301], dtype=torch.int32)
    return [
        *OPS.attention(q, k, k, None, None, None, None, None, 0, 1, -1, -1, 0.125, 0.0),
        *OPS.paged_attention(
            q[0, :, :1].transpose(0, 1), pages, pages, table, lengths, cu, None, None, True, -1, -1, 0.1, 0.0
        ),
        OPS.rms_norm(x, None, 1e-5, 0.0, False),
        OPS.gated_activation(x, x, "silu"),
        OPS.linear(x[:3], w, None),
    ]


def test_isa_is_forced_and_restored():
    before = library.current_isa()
    for name in library.available_isas():
        with library.use_isa(name):
            assert library.current_isa() == name
    assert library.current_isa() == before
    with pytest.raises(ValueError, match="isa must be one of"), library.use_isa("sse9"):
        pass


def test_thread_count_is_torchs_and_no_pool_is_added():
    """C1: ollama #17916 counted the host's threads."""
    script = """
import os, torch
import atb_modules.kernels.cpu
from tests_helper import run_all
def tasks():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
before = tasks()
for _ in range(20): run_all()
assert tasks() == before, (tasks(), before)
for count in (2, 4, 1):
    torch.set_num_threads(count)
    torch.randn(1 << 20).sum(); torch.randn(4, 1 << 18).sum(1)
    x = torch.randn(512, 512); x @ x; (x + x).exp()
    before = tasks()
    for _ in range(20): run_all()
    assert tasks() <= max(before, count + 1), (count, tasks(), before)
maps = {l.split("/")[-1].strip() for l in open("/proc/self/maps") if "gomp" in l or "libomp" in l or "libiomp" in l}
assert len(maps) == 1, maps
"""
    helper = f"""
import sys, importlib.util
spec = importlib.util.spec_from_file_location("tests_helper", {__file__!r})
sys.modules["tests_helper"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
    subprocess.run([sys.executable, "-c", helper + script], check=True, timeout=120)


class _InWorkers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert torch.get_num_threads() == 1
        return [t.clone() for t in run_all()]


def test_forked_workers_do_not_hang():
    """C2: pytorch #17199, a worker's first parallel region after the parent's."""
    parent = run_all()
    loader = torch.utils.data.DataLoader(
        _InWorkers(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=30
    )
    rows = list(loader)
    assert len(rows) == 4
    for row in rows:
        for mine, theirs in zip(parent, row, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_results_repeat_bit_for_bit(isa, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = run_all()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, run_all(), strict=True))
    finally:
        torch.set_num_threads(before)


def test_wide_registers_only_in_their_symbols():
    """C3: faiss #5296, an instruction of the build machine outside the code that is chosen at run time."""
    if os.uname().machine != "x86_64":
        return  # one instruction set is built there
    objdump = shutil.which("objdump")
    assert objdump, "this test needs objdump (binutils)"
    text = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", library_path()], capture_output=True, text=True, check=True
    )
    symbol, wide = "", {}
    for line in text.stdout.splitlines():
        header = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if header:
            symbol = header.group(1)
        elif "%ymm" in line or "%zmm" in line:
            wide[symbol] = wide.get(symbol, "") or line.split("\t", 1)[-1]
    assert wide, "no vector code was found at all"
    strangers = {name: line for name, line in wide.items() if "4avx2" not in name and "6avx512" not in name}
    assert not strangers, strangers
    narrow = {name for name in wide if "6avx512" not in name and "%zmm" in wide[name]}
    assert not narrow, narrow


def test_every_kernel_under_sanitizers(tmp_path):
    """ASan and UBSan over odd sizes: the stand-alone target of the build."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake and shutil.which("g++"), "this test needs cmake and g++"
    build = ROOT / "build" / "sanitize"
    subprocess.run([cmake, "-S", ROOT, "-B", build, "-DATB_SANITIZE=ON"], check=True, capture_output=True)
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run([cmake, "--build", build, "--parallel", jobs], check=True, capture_output=True)
    run = subprocess.run([build / "atb_sanitize"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("all kernels ran") == len(library.available_isas())


def test_without_the_library_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(library, "_candidates", list)
    library._load.cache_clear()
    try:
        assert library.unavailable_reason() == "native library not built"
        assert library.available_isas() == ()
        with pytest.raises(RuntimeError, match="native library not built"):
            library.get()
    finally:
        library._load.cache_clear()
        monkeypatch.undo()
    assert library.unavailable_reason() is None

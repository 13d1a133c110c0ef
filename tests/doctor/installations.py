"""Faked installations of CANN, torch_npu, driver and tools, in a directory that stands for the root."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from atb_modules.doctor import Places

SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi {version}                 Version: {version}                                            |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     {chip}               | OK            | 95.1        38                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3161 / 65536         |
| 1     {chip}               | OK            | 92.0        36                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3160 / 65536         |
+===========================+===============+====================================================+
"""


class Installation:
    """Parts are put there one by one; ``places()`` is what the doctor looks at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages = root / "site-packages"
        self.packages.mkdir(parents=True)
        self.environ: dict[str, str] = {"PATH": str(root / "bin")}
        self.torch = "2.9.1"

    @property
    def cann_home(self) -> Path:
        return self.root / "usr/local/Ascend/ascend-toolkit/latest"

    def write(self, path: str | Path, text: str | bytes) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def cann(self, version: str | None, *, sourced: bool = True) -> Installation:
        self.cann_home.mkdir(parents=True)
        if version is not None:
            text = f"package_name=Ascend-cann-toolkit\nversion={version}\narch=aarch64\npath=/usr/local/Ascend\n"
            self.write(self.cann_home / "aarch64-linux/ascend_toolkit_install.info", text)
        if sourced:
            self.source()
        return self

    def source(self) -> None:
        (self.cann_home / "opp").mkdir(exist_ok=True)
        self.environ |= {
            "ASCEND_HOME_PATH": str(self.cann_home),
            "ASCEND_OPP_PATH": str(self.cann_home / "opp"),
            "LD_LIBRARY_PATH": f"/opt/lib:{self.cann_home}/lib64",
        }

    def package(self, name: str, version: str, *requires: str) -> Installation:
        needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
        self.write(
            self.packages / f"{name}-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        )
        return self

    def torch_npu(self, version: str, *requires: str, code: str = "") -> Installation:
        """A package that imports, or runs ``code``."""
        self.write(self.packages / "torch_npu/__init__.py", code)
        self.write(self.packages / "torch/__init__.py", "")  # an import of torch takes seconds
        return self.package("torch_npu", version, *requires)

    def driver(self, version: str = "24.1.rc3", firmware: str = "7.5.0.3.220") -> Installation:
        self.write("usr/local/Ascend/driver/version.info", f"Version={version}\nascendhal_version=7.35.23\n")
        self.write("usr/local/Ascend/firmware/version.info", f"Version={firmware}\nfirmware_version=1.0\n")
        return self

    def npu_smi(self, script: str | None = None, chip: str = "910B1", version: str = "24.1.rc3") -> Installation:
        shown = SMI.format(chip=chip, version=version)
        body = f"import sys\nassert sys.argv[1:] == ['info']\nprint({shown!r})" if script is None else script
        tool = self.write("bin/npu-smi", f"#!{sys.executable}\n{body}\n")
        os.chmod(tool, tool.stat().st_mode | stat.S_IXUSR)
        return self

    def atb(self, abi: int, version: str | None = None, *, sourced: bool = True) -> Installation:
        home = self.root / f"usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_{abi}"
        home.mkdir(parents=True)
        if version is not None:
            self.write(home.parents[1] / "version.info", f"Ascend-cann-atb : {version}\nVersion={version}\n")
        if sourced:
            self.environ["ATB_HOME_PATH"] = str(home)
        return self

    def places(self, seconds: float = 60.0) -> Places:
        return Places(
            environ=self.environ,
            root=self.root,
            package_path=(str(self.packages),),
            torch_version=self.torch,
            command_seconds=seconds,
        )

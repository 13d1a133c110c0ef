"""Which versions are here, and by which file that is known."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from pathlib import Path

import torch

from atb_modules.doctor.data import Finding, Found, Level, Software
from atb_modules.doctor.matrix import cann_version
from atb_modules.doctor.places import Places, find_files, is_directory, read_settings, run_command
from atb_modules.kernels.ascend import ascendc
from atb_modules.kernels.ascend.socs import find_soc

#: where CANN lies when nobody says otherwise, newest layout first
CANN_HOMES = (
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/latest",
    "/usr/local/Ascend/nnae/latest",
)
ATB_HOMES = ("/usr/local/Ascend/nnal/atb/latest",)
DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
#: files that name the version of a whole installation, and those that name a part's
_INSTALL_INFO = ("ascend_*_install.info", "*/ascend_*_install.info")
_PART_INFO = ("version.info", "compiler/version.info", "runtime/version.info", "opp/version.info", "*/version.info")
_PREFERRED = ("cann", "toolkit", "nnae", "nnrt")
_CHIP = re.compile(r"^\|\s*\d+\s+((?:Ascend)?\d{3}\w*)\s*\|", re.MULTILINE | re.IGNORECASE)
_SMI_VERSION = re.compile(r"npu-smi\s+(\d[\w.]*)", re.IGNORECASE)


def find_software(places: Places) -> tuple[Software, list[Finding]]:
    """Every version that can be found, and what stood in the way of finding it."""
    import atb_modules

    findings: list[Finding] = []
    home = cann_home(places)
    cann = _cann(home, findings)
    torch_npu, pin = _torch_npu(places, findings)
    driver, firmware = _versions_of(places, DRIVER, findings), _versions_of(places, FIRMWARE, findings)
    smi_driver, smi_soc = _npu_smi(places)
    numpy = places.distributions("numpy")
    atb_home = _atb_home(places)
    atb = _atb(atb_home, findings)
    software = Software(
        python=platform.python_version(),
        atb_modules=atb_modules.__version__,
        torch=places.torch_version or str(torch.__version__),
        numpy=Found(numpy[0].version, "installed") if numpy else Found(),
        torch_npu=torch_npu,
        torch_pin=pin,
        cann=cann,
        cann_home=None if home is None else str(home),
        atb=atb,
        ascend_c=_ascend_c(),
        driver=driver if driver.value else smi_driver,
        firmware=firmware,
        soc=_soc_of_process() or smi_soc,
        torch_abi=int(torch.compiled_with_cxx11_abi()),
        atb_abi=_abi(atb_home),
        emulated=is_emulated(),
    )
    return software, findings


def is_emulated() -> bool:
    """Whether torch_npu runs on the stubs of ``atb_modules.testing.npu`` in this process."""
    boot = sys.modules.get("atb_modules.testing.npu.boot")
    return boot is not None and boot.booted() is not None


def _ascend_c() -> Found:
    """The library of our Ascend C kernels."""
    if ascendc.loaded():
        return Found("loaded", str(ascendc.LIBRARY))
    return Found("built", str(ascendc.LIBRARY)) if ascendc.LIBRARY.is_file() else Found()


def cann_home(places: Places) -> Path | None:
    """The directory of CANN: what the environment names, where it exists, else a default place that exists."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        value = places.environ.get(name)
        if value and is_directory(value):
            return Path(value)
    return next((path for path in map(places.at_root, CANN_HOMES) if is_directory(path)), None)


def _cann(home: Path | None, findings: list[Finding]) -> Found:
    if home is None:
        return Found()
    infos = find_files(home, _INSTALL_INFO)
    infos.sort(key=lambda path: next((i for i, word in enumerate(_PREFERRED) if word in path.name), len(_PREFERRED)))
    versions: dict[str, Path] = {}
    for path in infos:
        version = _version_in(path, ("version",), findings)
        if version is not None:
            versions.setdefault(version, path)
    if len(versions) > 1:
        listed = ", ".join(f"{version} ({path.name})" for version, path in versions.items())
        text = f"parts of different versions lie in {home}: {listed}"
        findings.append(Finding(Level.WARNING, "CANN", text, "install all parts of one CANN"))
    for path in [] if versions else find_files(home, _PART_INFO):
        version = _version_in(path, ("version_dir", "version"), findings)
        if version is not None:
            versions.setdefault(version, path)
    if versions:
        version, path = next(iter(versions.items()))
        return Found(version, str(path))
    text = f"no file in {home} tells its version"
    findings.append(Finding(Level.WARNING, "CANN", text, "look for ascend_*_install.info; install CANN again"))
    return Found(None, str(home))


def _version_in(path: Path, keys: tuple[str, ...], findings: list[Finding]) -> str | None:
    """The CANN version in a file of settings, or a finding that says why there is none."""
    settings, problem = read_settings(path)
    for key in keys:
        version = cann_version(settings.get(key, ""))
        if version is not None:
            return version
    findings.append(Finding(Level.WARNING, "CANN", problem or f"{path} names no version of CANN"))
    return None


def _torch_npu(places: Places, findings: list[Finding]) -> tuple[Found, str | None]:
    """(torch_npu, what it asks of torch): as emulated, as installed, or as imported from elsewhere."""
    boot = sys.modules.get("atb_modules.testing.npu.boot")
    here = None if boot is None else boot.booted()
    if here is not None:
        return Found(here.version, f"{here.directory} on stubs"), None
    installed = places.distributions("torch_npu")
    if not installed:
        imported = getattr(sys.modules.get("torch_npu"), "__version__", None)
        return (Found(str(imported), "imported") if imported else Found()), None
    versions = dict.fromkeys(distribution.version for distribution in installed)
    if len(versions) > 1:
        text = f"versions {', '.join(versions)} are installed side by side; the first is imported"
        findings.append(Finding(Level.WARNING, "torch_npu", text, "uninstall all of them, then install one"))
    try:
        needs = installed[0].requires or []
    except Exception:  # metadata of a broken installation, whatever is wrong with it
        needs = []
    pins = (re.match(r"torch\s*\(?\s*==\s*([\w.*+]+)", need) for need in needs)
    pin = next((found[1] for found in pins if found), None)
    return Found(installed[0].version, str(installed[0].locate_file("")).rstrip("/")), pin


def _versions_of(places: Places, name: str, findings: list[Finding]) -> Found:
    """A driver or firmware, as its ``version.info`` says."""
    path = places.at_root(name)
    try:
        if not path.exists():
            return Found()
    except OSError:
        pass  # a directory on the way may not be entered: reading tells
    settings, problem = read_settings(path)
    version = settings.get("version") or settings.get("package_version")
    if not version or re.search(r"\d", version) is None:
        subject = path.parent.name
        findings.append(Finding(Level.WARNING, subject, problem or f"{path} names no version"))
        return Found(None, str(path))
    return Found(version, str(path))


def _npu_smi(places: Places) -> tuple[Found, Found]:
    """(driver, chip) as ``npu-smi info`` tells them; nothing where it is not there or does not answer."""
    command = shutil.which("npu-smi", path=places.environ.get("PATH", ""))
    if command is None:
        local = places.at_root("/usr/local/bin/npu-smi")
        command = shutil.which(str(local))
    if command is None:
        return Found(), Found()
    status, output = run_command([command, "info"], places.environ, min(10.0, places.command_seconds))
    if status != 0:
        why = f"npu-smi info failed: {output.strip()[:200]}" if status is not None else output
        return Found(), Found(None, why)
    version, chips = _SMI_VERSION.search(output), _CHIP.findall(output)
    if not chips:
        return Found(version and version[1], "npu-smi info"), Found(None, "npu-smi info lists no chip")
    names = dict.fromkeys(soc_name(chip) for chip in chips)
    chip = Found(", ".join(names), f"npu-smi info: {len(chips)} chip(s)")
    return Found(version and version[1], "npu-smi info"), chip


def soc_name(chip: str) -> str:
    """The key of ``SOCS`` for a chip as a tool names it ("910B1"), or that name itself."""
    for name in (chip, f"Ascend{chip}"):
        try:
            return find_soc(name).name
        except ValueError:
            continue
    return chip


def _soc_of_process() -> Found | None:
    """The chip of ``npu:0`` in this process."""
    npu = getattr(torch, "npu", None)
    if npu is None:
        return None
    try:
        name = str(npu.get_device_name(0))
    except Exception as error:  # whatever the driver says
        return Found(None, f"npu:0 does not answer: {str(error)[:200]}")
    return Found(soc_name(name), f"npu:0 is {name}")


def _atb_home(places: Places) -> Path | None:
    value = places.environ.get("ATB_HOME_PATH")
    if value:
        return Path(value)
    return next((path for path in map(places.at_root, ATB_HOMES) if is_directory(path)), None)


def _abi(home: Path | None) -> int | None:
    """The C++ ABI of the ATB that the environment chose: the last part of its path."""
    found = None if home is None else re.search(r"cxx_abi_([01])", str(home))
    return None if found is None else int(found[1])


def _atb(home: Path | None, findings: list[Finding]) -> Found:
    """ATB stands in ``atb/cxx_abi_*`` below the directory that holds its files."""
    if home is None:
        return Found()
    for directory in (home, *list(home.parents)[:2]):
        for path in find_files(directory, ("ascend_nnal_install.info", "version.info", "ascend_*_install.info")):
            settings, problem = read_settings(path)
            version = next((cann_version(v) for k, v in settings.items() if "version" in k and cann_version(v)), None)
            if version is not None:
                return Found(version, str(path))
            findings.append(Finding(Level.WARNING, "ATB", problem or f"{path} names no version"))
    return Found(None, str(home))

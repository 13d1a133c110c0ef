"""Ascend systems on chip, as numbers: what the planner, the tilings and the constraints of kernels are computed from.

Sources: the vendor's platform files for cores, memories and clocks. Peak rates are derived, not measured: cube products
as 2 x 16^3 operations a core and cycle, bandwidth as the memory's bytes a core and cycle. They are priors until
somebody calibrates them on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KIB, MIB, GIB = 1024, 1024**2, 1024**3


@dataclass(frozen=True)
class Soc:
    """One system on chip; of A3 (910_93), one of its two dies.

    Args:
        name: key of ``SOCS``, lower case.
        version: what CANN calls it in ``SOC_VERSION``.
        arch: of the cores, as ``--npu-arch`` of the device compiler names it.
        cube_cores, vector_cores: matrix units and vector units.
        hbm, l2, ub, l1, l0a, l0b, l0c: bytes of device memory, its cache, and a core's buffers (0: not published). Of
            the 256 KiB of a 950's unified buffer the platform file gives 248; 8 are what the documentation says some
            vector instructions over repeats take ("8KB of temporary space").
        mhz: clock.
        tera_flops: float16 products, 1e12 operations a second.
        tera_bytes: device memory, 1e12 bytes a second.
        bfloat16: whether its cores compute in bfloat16.
        ub_to_l1: whether Ascend C copies from a vector core's buffer to the cube core's L1 without a detour through
            global memory (of dav-3510, the documentation says: added, a data path from the unified buffer to L1).
    """

    name: str
    version: str
    arch: str
    cube_cores: int
    vector_cores: int
    hbm: int
    l2: int
    mhz: int
    tera_flops: float
    tera_bytes: float
    ub: int
    l1: int
    l0a: int
    l0b: int
    l0c: int
    bfloat16: bool = True
    ub_to_l1: bool = False

    @property
    def npu_arch(self) -> int:
        """``arch`` as the device compiler's macro ``__NPU_ARCH__`` has it."""
        return int(self.arch.removeprefix("dav-"))

    @property
    def balance(self) -> float:
        """Operations a byte of device memory below which a kernel waits for memory."""
        return self.tera_flops / self.tera_bytes

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether its cores compute in ``dtype``."""
        if dtype == torch.bfloat16:
            return self.bfloat16
        return dtype in (torch.float16, torch.float32)


def _split(name: str, cores: int, hbm: int, l2: int, mhz: int, flops: float, bandwidth: float, version: str) -> Soc:
    """A chip of the 910B generation: separate cube and vector cores, one cube core with two vector cores."""
    return Soc(
        name, version, "dav-2201", cores, 2 * cores, hbm * GIB, l2 * MIB, mhz, flops, bandwidth,
        ub=192 * KIB, l1=512 * KIB, l0a=64 * KIB, l0b=64 * KIB, l0c=128 * KIB,
    )  # fmt: skip


SOCS: dict[str, Soc] = {
    soc.name: soc
    for soc in (
        _split("ascend910b1", 24, 64, 192, 1850, 363.7, 1.42, "Ascend910B1"),
        _split("ascend910b2", 24, 64, 192, 1800, 353.9, 1.38, "Ascend910B2"),
        _split("ascend910b3", 20, 64, 192, 1800, 294.9, 1.15, "Ascend910B3"),
        _split("ascend910b4", 20, 32, 96, 1500, 245.8, 0.96, "Ascend910B4"),
        _split("ascend910_93", 24, 64, 192, 1850, 363.7, 1.42, "Ascend910_9391"),
        Soc(
            "ascend310p", "Ascend310P3", "dav-2002", 10, 8, 22 * GIB, 16 * MIB, 1060, 86.8, 0.18,
            ub=256 * KIB, l1=1024 * KIB, l0a=64 * KIB, l0b=64 * KIB, l0c=256 * KIB, bfloat16=False,
        ),
        Soc(
            "ascend950", "Ascend950PR_9599", "dav-3510", 32, 64, 128 * GIB, 128 * MIB, 1650, 432.5, 1.64,
            ub=248 * KIB, l1=512 * KIB, l0a=64 * KIB, l0b=64 * KIB, l0c=256 * KIB, ub_to_l1=True,
        ),
    )
}  # fmt: skip


def find_soc(name: str) -> Soc:
    """The row of ``SOCS`` that a name of the runtime or a user belongs to, "Ascend910_9391" to "ascend910_93".

    Raises:
        ValueError: for a name without a row.
    """
    if not isinstance(name, str):
        raise TypeError(f"soc is {type(name).__name__}; allowed: one of {', '.join(SOCS)}")
    lower = name.lower()
    if lower in SOCS:
        return SOCS[lower]
    for prefix in ("ascend910_93", "ascend310p", "ascend950"):
        if lower.startswith(prefix):
            return SOCS[prefix]
    raise ValueError(f"soc is {name!r}; allowed: {', '.join(SOCS)} (or a version of one, as the runtime names it)")

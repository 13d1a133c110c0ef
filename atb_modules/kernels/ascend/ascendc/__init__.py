"""Our Ascend C kernels: their sources, how they are built, and the torch ops ``atb_modules::ascend_*`` above them.

The ops exist once the library of the binding is loaded. With CANN, torch and torch_npu it is built by one command,

    cmake -S atb_modules/kernels/ascend/ascendc -B build/ascend && cmake --build build/ascend

which leaves it in this folder. Without CANN the same sources run on the emulation of ``atb_modules.testing.ascendc``.
"""

from __future__ import annotations

from pathlib import Path

import torch

#: where the build leaves the library
LIBRARY = Path(__file__).parent / "libatb_ascend.so"
_LOADED: list[Path] = []


def load(path: Path | str | None = None) -> bool:
    """Load the ops, once a process; whether they are there afterwards.

    Args:
        path: the library; default where the build leaves it, and False where it was not built.

    Raises:
        OSError: the library does not load: torch_npu is not imported, or was built for another torch.
    """
    if _LOADED:
        return True
    library = LIBRARY if path is None else Path(path)
    if path is None and not library.is_file():
        return False
    torch.ops.load_library(str(library))
    _LOADED.append(library)
    from atb_modules.kernels import registry
    from atb_modules.kernels.ascend.ascendc import autograd

    autograd.register()
    registry.forget_choices()  # made without the ops
    return True


def loaded() -> bool:
    """Whether the ops are there."""
    return bool(_LOADED)

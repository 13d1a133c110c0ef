"""The process behind ``dry_run_on``: calls on stdin, results on stdout, whatever else is printed on stderr."""

from __future__ import annotations

import os
import pickle
import sys

import torch
from torch.utils._pytree import tree_map

from atb_modules.testing.npu.boot import boot
from atb_modules.testing.npu.host_code import DryCall, DryResult, TensorSpec, dry_run


def perform(call: DryCall) -> DryResult:
    """Run one call's host code."""
    namespace, _, rest = call.operator.partition("::")
    name, _, overload = rest.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    args, kwargs = tree_map(
        lambda value: value.build() if isinstance(value, TensorSpec) else value, (list(call.args), dict(call.kwargs))
    )
    try:
        with dry_run() as launches:
            operator(*args, **kwargs)
    except Exception as error:
        return DryResult(error=str(error) or repr(error))
    return DryResult(tuple(launches))


def main() -> None:
    results_to = os.dup(1)
    os.dup2(2, 1)
    soc, calls, directory = pickle.loads(sys.stdin.buffer.read())
    boot(soc, torch_npu_dir=directory)
    results = [perform(call) for call in calls]
    with os.fdopen(results_to, "wb") as out:
        out.write(pickle.dumps(results))


if __name__ == "__main__":
    main()

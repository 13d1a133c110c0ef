"""The two rules of numerical parity between a candidate and the float64 reference.

1. The largest error is at most twice that of the plain implementation in the same dtype (three times with softcap),
   plus one rounding step: the rule of FlashAttention's tests. On a few hundred elements the largest error of *one*
   order of summation is a matter of luck, so the plain implementation may be given in several (``summation_orders``):
   its error is then the largest that it makes on these inputs.
2. The share of elements whose error exceeds ``r max(1, |golden|)`` is at most r, and every element is within
   ``e max(1, |golden|)``: the precision standard of Ascend operators. e doubles for reductions of 2,048 terms and more.

Both must hold. NaN in the candidate fails, unless golden has NaN there too; infinities must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

#: dtype -> r, the share and the relative error of rule 2
SHARE = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-8}
#: dtype -> e, the bound on every element
BOUND = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-11, torch.float64: 2.0**-30}
LONG_REDUCTION = 2048


@dataclass(frozen=True)
class Comparison:
    """What was measured, and which rules failed (``failures`` is empty where parity holds)."""

    max_error: float
    plain_error: float | None
    share: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures


def compare(
    candidate: Tensor,
    golden: Tensor,
    plain: Tensor | Iterable[Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    reduction: int = 1,
    softcap: bool = False,
) -> Comparison:
    """Hold ``candidate`` against ``golden``.

    Args:
        candidate: what the kernel returned.
        golden: the float64 reference on the same inputs.
        plain: the plain PyTorch implementation in the candidate's dtype, or several evaluations of it, which are
            taken one by one until rule 1 holds or they end; None leaves rule 1 out.
        dtype: whose bounds apply; default the candidate's.
        reduction: terms summed for one element.
        softcap: whether scores were capped, which allows three times the plain error.
    """
    dtype = candidate.dtype if dtype is None else dtype
    if candidate.shape != golden.shape:
        raise ValueError(f"candidate has shape {tuple(candidate.shape)}; golden has {tuple(golden.shape)}")
    if candidate.numel() == 0:
        return Comparison(0.0, None if plain is None else 0.0, 0.0, ())
    golden = golden.double()
    failures = []
    error = _error(candidate, golden)
    max_error = float(error.max())
    scale = golden.abs().nan_to_num(posinf=0.0).clamp(min=1.0)
    share = float((error > SHARE[dtype] * scale).double().mean())
    if share > SHARE[dtype]:
        failures.append(f"share of elements beyond {SHARE[dtype]:g} is {share:.2e}, allowed {SHARE[dtype]:g}")
    bound = BOUND[dtype] * (2.0 if reduction >= LONG_REDUCTION else 1.0)
    worst = float((error / scale).max())
    if not worst <= bound:
        failures.append(f"largest scaled error is {worst:.2e}, allowed {bound:.2e}")
    plain_error = None
    if plain is not None:
        step = torch.finfo(dtype).eps * float(golden.abs().nan_to_num(posinf=0.0).max())
        plain_error = allowed = 0.0
        for evaluation in [plain] if isinstance(plain, Tensor) else plain:
            plain_error = max(plain_error, float(_error(evaluation, golden).nan_to_num(posinf=0.0).max()))
            allowed = (3.0 if softcap else 2.0) * plain_error + step
            if max_error <= allowed:
                break
        else:
            failures.append(f"largest error is {max_error:.2e}, allowed {allowed:.2e} (plain errs {plain_error:.2e})")
    return Comparison(max_error, plain_error, share, tuple(failures))


def assert_parity(
    candidate: Tensor,
    golden: Tensor,
    plain: Tensor | Iterable[Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    reduction: int = 1,
    softcap: bool = False,
    what: str = "candidate",
) -> None:
    """Raise AssertionError with every rule that failed; see ``compare``."""
    result = compare(candidate, golden, plain, dtype=dtype, reduction=reduction, softcap=softcap)
    if not result.ok:
        raise AssertionError(f"{what}: " + "; ".join(result.failures))


def _error(candidate: Tensor, golden: Tensor) -> Tensor:
    """Absolute error; 0 where both are the same infinity or both NaN, inf where only one is."""
    candidate = candidate.double()
    same = (candidate == golden) | (candidate.isnan() & golden.isnan())
    return (candidate - golden).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))

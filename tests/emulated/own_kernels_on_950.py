"""Our kernels of dav-3510 behind torch's ops, in a process whose runtime names an Ascend 950: run as a module."""

from __future__ import annotations

import torch

from atb_modules import ops
from atb_modules.kernels.ascend.ascendc import load
from atb_modules.kernels.reference.attention import attention_reference
from atb_modules.kernels.reference.norm import rms_norm_reference
from atb_modules.norm_linear import norm_linear
from atb_modules.spec import AttentionSpec
from atb_modules.testing import assert_parity, fresh_generator
from atb_modules.testing.ascendc.binding import build_binding
from atb_modules.testing.npu import EmulatedNPU, boot


def main() -> None:
    booted = boot("ascend950")
    assert load(build_binding(booted.directory / "torch_npu", arch=booted.soc.npu_arch))
    generator = fresh_generator()
    draw = lambda *shape, dtype: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    with EmulatedNPU(soc="ascend950"), torch.no_grad():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x, norm, weight = draw(21, 300, dtype=dtype), draw(300, dtype=dtype), draw(70, 300, dtype=dtype) / 16
            there = [t.to("npu:0") for t in (x, norm, weight)]
            out = norm_linear(*there, strategy="ascend_c")
            normed = rms_norm_reference(x.double(), norm.double(), 1e-6).to(dtype)
            assert_parity(out.cpu(), normed.double() @ weight.double().t(), reduction=300, what=f"norm_linear {dtype}")
            q, k, v = draw(2, 4, 33, 80, dtype=dtype), *(draw(2, 2, 75, 80, dtype=dtype) for _ in range(2))
            spec = AttentionSpec(causal=True, window=(40, 0))
            out, _ = ops.attention(*(t.to("npu:0") for t in (q, k, v)), spec, strategy="ascend_c")
            golden, _ = attention_reference(*(t.double() for t in (q, k, v)), spec)
            assert_parity(out.cpu(), golden, reduction=41, what=f"attention {dtype}")
    print("parity on", booted.soc.version)


if __name__ == "__main__":
    main()

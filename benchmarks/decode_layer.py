"""Decode through the one-call layer, SmolLM2-135M's shapes: time a token against the bandwidth limit.

Run: python benchmarks/decode_layer.py. The limit is the bytes of weights and cache that a token reads over the read
bandwidth of a plain sum over as many bytes, measured between the runs; medians of interleaved repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from atb_modules.kernels.cpu import DecodeLayerPlan, DecodeSettings, DecodeWeights, library

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, PAGE = 576, 9, 3, 64, 1536, 30, 16


def make_plans(dtype: torch.dtype, past: int) -> tuple[list[DecodeLayerPlan], int]:
    """Plans of all layers, and the bytes that one token reads."""
    settings = DecodeSettings(HEADS, KV_HEADS, HEAD_DIM, rotary_dim=HEAD_DIM, eps=1e-5)
    pages = past // PAGE + 1
    plans, read = [], 0
    for _ in range(LAYERS):
        weights = DecodeWeights(
            qkv=torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN).div_(24).to(dtype),
            o=torch.randn(HIDDEN, HEADS * HEAD_DIM).div_(24).to(dtype),
            gate_up=torch.randn(2 * INTERMEDIATE, HIDDEN).div_(24).to(dtype),
            down=torch.randn(HIDDEN, INTERMEDIATE).div_(40).to(dtype),
            attn_norm=torch.ones(HIDDEN),
            mlp_norm=torch.ones(HIDDEN),
        )
        shape = (pages, KV_HEADS, PAGE, HEAD_DIM)
        plans.append(DecodeLayerPlan(weights, settings, torch.randn(shape), torch.randn(shape)))
        plans[0].share_workspace(plans[-1])
        matrices = (weights.qkv, weights.o, weights.gate_up, weights.down)
        read += sum(m.numel() * m.element_size() for m in matrices) + 2 * 4 * past * KV_HEADS * HEAD_DIM
    return plans, read


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--past", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--isa", choices=library.available_isas(), help="force an instruction set of this machine")
    options = parser.parse_args()
    if options.isa is not None:
        with library.use_isa(options.isa):
            compare(options.past, options.repeats)
    else:
        compare(options.past, options.repeats)


def compare(past: int, repeats: int) -> None:
    print(f"{library.current_isa()}, {torch.get_num_threads()} threads, {LAYERS} layers, {past} past tokens")
    print(f"{'weights':>9} {'ours ms':>8} {'limit ms':>9} {'GB/s':>6} {'share':>6}")
    for dtype in (torch.float32, torch.bfloat16):
        plans, read = make_plans(dtype, past)
        hidden = torch.randn(1, HIDDEN)
        angle = torch.rand(1, HEAD_DIM // 2)
        table = torch.arange(past // PAGE + 1, dtype=torch.int32)[None]
        step = (angle.cos(), angle.sin(), torch.tensor([past]), table, torch.tensor([past + 1], dtype=torch.int32))

        def token(plans=plans, hidden=hidden, step=step):
            hidden.normal_()
            for plan in plans:
                plan.run(hidden, *step)

        plain = torch.ones(read // 4)
        ours, limit = [], []
        for _ in range(repeats):
            ours.append(timed(token))
            limit.append(timed(plain.sum))
        mine, bound = statistics.median(ours), statistics.median(limit)
        name = str(dtype).removeprefix("torch.")
        print(f"{name:>9} {mine * 1e3:8.2f} {bound * 1e3:9.2f} {read / bound / 1e9:6.1f} {bound / mine:6.0%}")


if __name__ == "__main__":
    main()

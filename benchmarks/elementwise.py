"""Fused norms, rotary, SwiGLU, AdaLN at (2048, 4096) float32 against copy_, plain formulas and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import atb_modules  # noqa: F401  (its native operators)
from benchmarks.timing import Row, interleave, median, row

ROWS, WIDTH, HEADS = 2048, 4096, 64
ROUNDS = 25
EPS = 1e-6
native = torch.ops.atb_modules


def rows() -> list[Row]:
    """Each op with preallocated outputs, then with fresh ones."""
    return _rms_norm() + _add_rms_norm() + _rotary() + _swiglu() + _modulated_norm()


def _compare(
    name: str,
    passes: int,
    preallocated: dict[str, Callable[[], object]],
    fresh: dict[str, Callable[[], object]],
) -> list[Row]:
    """``passes``: how many tensors of the full size the op must read or write."""
    source, target = torch.randn(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    with torch.inference_mode():
        times = interleave(preallocated | {f"{k} fresh": f for k, f in fresh.items()} | {
            "copy_": lambda: target.copy_(source)
        }, ROUNDS)  # fmt: skip
    limit = median(times, "copy_") * passes / 2
    bandwidth = {"limit_name": "copy_ bandwidth", "limit": limit}
    goals = {"transformers form, out=": ">= 3", "torch.compile, out=": ">= 1"}
    return [
        *(row(f"{name}, preallocated", times, peer, goals.get(peer, ""), **bandwidth) for peer in [*preallocated][1:]),
        row(f"{name}, fresh", times, "transformers form fresh", "", ours="ours fresh", **bandwidth),
        row(f"{name}, fresh", times, "torch.compile fresh", "", ours="ours fresh", **bandwidth),
    ]


def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


def _norm_out(x, weight, work, out, statistic):
    """transformers' LlamaRMSNorm with out= wherever its operators have it."""
    torch.square(x, out=work)
    torch.mean(work, -1, keepdim=True, out=statistic)
    torch.rsqrt(statistic.add_(EPS), out=statistic)
    torch.mul(x, statistic, out=work)
    return torch.mul(weight, work, out=out)


def _norm(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def _rms_norm() -> list[Row]:
    x, weight, out, work = (
        torch.randn(ROWS, WIDTH),
        torch.randn(WIDTH),
        torch.empty(ROWS, WIDTH),
        torch.empty(ROWS, WIDTH),
    )
    statistic = torch.empty(ROWS, 1)
    fused = _compiled(_norm)
    into = _compiled(lambda x, w, o: o.copy_(_norm(x, w)))
    return _compare(
        "RMSNorm",
        2,
        {
            "ours": lambda: native.rms_norm.out(x, weight, EPS, 0.0, True, out=out),
            "transformers form, out=": lambda: _norm_out(x, weight, work, out, statistic),
            "torch.compile, out=": lambda: into(x, weight, out),
        },
        {
            "ours": lambda: native.rms_norm(x, weight, EPS, 0.0, True),
            "transformers form": lambda: _norm(x, weight),
            "torch.compile": lambda: fused(x, weight),
        },
    )


def _add_rms_norm() -> list[Row]:
    x, residual, weight = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    out, total, work = (torch.empty(ROWS, WIDTH) for _ in range(3))
    statistic = torch.empty(ROWS, 1)

    def plain(x, residual, weight):
        total = x + residual
        return _norm(total, weight), total

    def plain_out():
        torch.add(x, residual, out=total)
        return _norm_out(total, weight, work, out, statistic)

    def copied(x, residual, weight, out, total):
        normed, added = plain(x, residual, weight)
        return out.copy_(normed), total.copy_(added)

    fused, into = _compiled(plain), _compiled(copied)
    schema = native.add_rms_norm.out._schema
    outputs = dict(zip([a.name for a in schema.arguments if a.is_out], (out, total), strict=True))
    return _compare(
        "add + RMSNorm",
        4,
        {
            "ours": lambda: native.add_rms_norm.out(x, residual, weight, EPS, 0.0, True, **outputs),
            "transformers form, out=": plain_out,
            "torch.compile, out=": lambda: into(x, residual, weight, out, total),
        },
        {
            "ours": lambda: native.add_rms_norm(x, residual, weight, EPS, 0.0, True),
            "transformers form": lambda: plain(x, residual, weight),
            "torch.compile": lambda: fused(x, residual, weight),
        },
    )


def _rotary() -> list[Row]:
    dim = WIDTH // HEADS
    x, out, work, turned = (torch.randn(ROWS, HEADS, dim) for _ in range(4))
    angles = torch.randn(ROWS, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (torch.cat([t, t], -1)[:, None] for t in (cos, sin))

    def plain(x, c, s):
        a, b = x.chunk(2, dim=-1)
        return x * c + torch.cat([-b, a], -1) * s

    def plain_out():
        a, b = x.chunk(2, dim=-1)
        torch.cat([torch.neg(b, out=work[..., : dim // 2]), a], -1, out=turned)
        torch.mul(x, wide_cos, out=out)
        return out.addcmul_(turned, wide_sin)

    fused, into = _compiled(plain), _compiled(lambda x, c, s, o: o.copy_(plain(x, c, s)))
    return _compare(
        "rotary",
        2,
        {
            "ours": lambda: native.rotary.out(x, cos, sin, False, out=out),
            "transformers form, out=": plain_out,
            "torch.compile, out=": lambda: into(x, wide_cos, wide_sin, out),
        },
        {
            "ours": lambda: native.rotary(x, cos, sin, False),
            "transformers form": lambda: plain(x, wide_cos, wide_sin),
            "torch.compile": lambda: fused(x, wide_cos, wide_sin),
        },
    )


def _swiglu() -> list[Row]:
    gate, up, out, work = (torch.randn(ROWS, WIDTH) for _ in range(4))

    def plain(gate, up):
        return F.silu(gate) * up

    def plain_out():
        return torch.mul(F.silu(gate), up, out=out)  # silu takes no out=

    def plain_out_everywhere():
        return torch.mul(torch._C._nn.silu(gate, out=work), up, out=out)

    fused, into = _compiled(plain), _compiled(lambda g, u, o: o.copy_(plain(g, u)))
    return _compare(
        "SwiGLU",
        3,
        {
            "ours": lambda: native.gated_activation.out(gate, up, "silu", out=out),
            "transformers form, out=": plain_out,
            "private silu, out=": plain_out_everywhere,
            "torch.compile, out=": lambda: into(gate, up, out),
        },
        {
            "ours": lambda: native.gated_activation(gate, up, "silu"),
            "transformers form": lambda: plain(gate, up),
            "torch.compile": lambda: fused(gate, up),
        },
    )


def _modulated_norm() -> list[Row]:
    """One scale and shift for every 512 rows, as a diffusion transformer has one a picture; fresh outputs alone."""
    x, scale, shift = torch.randn(4, ROWS // 4, WIDTH), torch.randn(4, 1, WIDTH), torch.randn(4, 1, WIDTH)
    flat, groups, target = x.reshape(ROWS, WIDTH), (scale[:, 0], shift[:, 0]), torch.empty(ROWS, WIDTH)

    def plain(x, scale, shift):
        return F.layer_norm(x, (WIDTH,), eps=EPS) * (1 + scale) + shift

    fused = _compiled(plain)
    with torch.inference_mode():
        times = interleave(
            {
                "ours": lambda: native.modulated_norm(flat, *groups, None, None, EPS, True),
                "DiT form": lambda: plain(x, scale, shift),
                "torch.compile": lambda: fused(x, scale, shift),
                "copy_": lambda: target.copy_(flat),
            },
            ROUNDS,
        )
    limit = {"limit_name": "copy_ bandwidth", "limit": median(times, "copy_")}
    return [row("LayerNorm + modulation, fresh", times, peer, "", **limit) for peer in ("DiT form", "torch.compile")]

"""Mixture of experts: a Mixtral-like block in float32 against transformers' blocks, and its products alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import atb_modules as atb
from atb_modules.mlp import route
from benchmarks.timing import Row, interleave, median, row

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 1024, 3584, 8, 2, 512
ROUNDS = 11


def rows() -> list[Row]:
    """Forward, forward with backward, and one token."""
    peers = {name: _peer(name) for name in ("eager", "grouped_mm")}
    ours = atb.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
    ours.load_state_dict(peers["eager"].state_dict())
    blocks: dict[str, torch.nn.Module] = {"ours": ours}
    blocks |= {f"transformers {name}": peer for name, peer in peers.items()}
    return _forward(blocks) + _training(blocks) + _one_token(blocks)


def _peer(name: str) -> MixtralSparseMoeBlock:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = name
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return block


def _products(ours: atb.MoE, x: torch.Tensor) -> Callable[[], None]:
    """The products of each expert's rows with nothing around them, for the routing of x."""
    _, chosen = route(ours.router(x), TOP_K)
    parts = [x[(chosen == number).any(-1)] for number in range(EXPERTS)]
    inner = [torch.randn(part.shape[0], INTERMEDIATE) for part in parts]

    def run() -> None:
        for number, (part, hidden) in enumerate(zip(parts, inner, strict=True)):
            F.linear(part, ours.experts.gate_up_proj[number])
            F.linear(hidden, ours.experts.down_proj[number])

    return run


def _rows(name: str, blocks: dict, calls: dict, products: str | None = None) -> list[Row]:
    times = interleave(calls, ROUNDS, settle=True)
    limit = {} if products is None else {"limit_name": "the products alone", "limit": median(times, products)}
    return [row(name, times, peer, ">= 1", **limit) for peer in blocks if peer != "ours"]


def _forward(blocks: dict) -> list[Row]:
    x = torch.randn(1, TOKENS, HIDDEN)
    with torch.inference_mode():
        calls = {name: lambda block=block: block(x) for name, block in blocks.items()}
        calls["products"] = _products(blocks["ours"], x[0])
        return _rows(f"MoE {EXPERTS} x {INTERMEDIATE}, {TOKENS} tokens, float32", blocks, calls, "products")


def _training(blocks: dict) -> list[Row]:
    x = torch.randn(1, TOKENS, HIDDEN)

    def step(block: torch.nn.Module) -> None:
        block.zero_grad()
        block(x.clone().requires_grad_()).square().sum().backward()

    blocks = {name: copy.deepcopy(block) for name, block in blocks.items()}
    calls = {name: lambda block=block: step(block) for name, block in blocks.items()}
    return _rows(f"MoE forward and backward, {TOKENS} tokens, float32", blocks, calls)


def _one_token(blocks: dict) -> list[Row]:
    x = torch.randn(1, 1, HIDDEN)
    with torch.inference_mode():
        calls = {name: lambda block=block: block(x) for name, block in blocks.items()}
        calls["products"] = _products(blocks["ours"], x[0])
        return _rows(f"MoE {EXPERTS} x {INTERMEDIATE}, 1 token, float32", blocks, calls, "products")

"""MoE: a router, the experts it chooses among, and shared experts; in the place of a FeedForward."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from atb_modules.checks import check_bool, check_device, check_int, check_parameter_dtype, check_tensor, check_type
from atb_modules.linear import Linear
from atb_modules.mlp.experts import moe
from atb_modules.mlp.feed_forward import FeedForward, MLPConfig, MLPType
from atb_modules.mlp.routing import MoEConfig, RouterConfig, route
from atb_modules.strategies import parse_enum

#: transformers' names of the parts of a mixture, and ours.
_RENAMED = {
    "gate.weight": "router.weight",
    "gate.bias": "router.bias",
    "gate.e_score_correction_bias": "score_correction",
    "shared_expert_gate.weight": "shared_gate.weight",
}
#: Names of an expert's gate, up and down projection: Qwen's and DeepSeek's, then Mixtral's.
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_EXPERT = re.compile(rf"experts\.(\d+)\.({'|'.join(_PARTS)})\.(weight|bias)")


class Experts(nn.Module):
    """The feed-forwards of a mixture, each weight stored for all of them at once.

    ``gate_up_proj`` (num_experts, 2 * intermediate_size, hidden_size), gate first (``up_proj`` where the type is not
    gated), and ``down_proj`` (num_experts, hidden_size, intermediate_size). Weights start as in ``Linear``.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        mlp_type: MLPType | str = MLPType.SWIGLU,
        *,
        config: MLPConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("num_experts", num_experts),
        ):
            check_int(name, value)
        check_type("config", config, MLPConfig, optional=True)
        check_device(device)
        check_parameter_dtype(dtype)
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.mlp_type = parse_enum(MLPType, mlp_type, "mlp_type")
        self.config = config if config is not None else MLPConfig()
        self.up_name = "gate_up_proj" if self.mlp_type.is_gated else "up_proj"
        rows = (2 if self.mlp_type.is_gated else 1) * intermediate_size
        sizes = {self.up_name: (rows, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, size in sizes.items():
            weight = torch.empty(num_experts, *size, device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(weight))
            bias = torch.empty(num_experts, size[0], device=device, dtype=dtype) if self.config.bias else None
            self.register_parameter(f"{name}_bias", None if bias is None else nn.Parameter(bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x (..., hidden_size), experts and weights (..., top_k) -> (..., hidden_size)."""
        return moe(
            x,
            experts,
            weights,
            getattr(self, self.up_name),
            self.down_proj,
            up_bias=getattr(self, f"{self.up_name}_bias"),
            down_bias=self.down_proj_bias,
            kind=self.mlp_type.activation,
            gated=self.mlp_type.is_gated,
            strategy=self.config.strategy,
        )

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size}, {self.intermediate_size}), mlp_type={self.mlp_type.value}"


class MoE(nn.Module):
    """A mixture of experts: each token through the ``top_k`` experts that a router chooses, plus shared experts.

    The router's product and scores are float32 in every dtype (``route``). No token is dropped and nothing is padded,
    however unequal the load (``moe``). Modules: ``router``, ``experts``, and ``shared_expert`` and ``shared_gate``
    where there are any. State dicts in the names of transformers' Mixtral, Qwen-MoE and DeepSeek blocks load too,
    with the experts one by one or stacked.

    Args:
        hidden_size, intermediate_size: channels of the stream and inside each routed expert.
        num_experts, top_k: routed experts, and how many serve a token.
        mlp_type: of the experts, see ``FeedForward``.
        num_shared_experts, shared_intermediate_size, shared_gate: see ``MoEConfig``.
        router: a ``RouterConfig``.
        config: an ``MLPConfig`` without ``moe``: biases and strategies.

    x: (..., hidden_size) -> (..., hidden_size).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        mlp_type: MLPType | str = MLPType.SWIGLU,
        *,
        num_shared_experts: int = 0,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        router: RouterConfig | None = None,
        config: MLPConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_type("router", router, RouterConfig, optional=True)
        check_type("config", config, MLPConfig, optional=True)
        config = config if config is not None else MLPConfig()
        if config.moe is not None or config.dropout:
            name = "moe" if config.moe is not None else "dropout"
            raise ValueError(f"config.{name} is {getattr(config, name)}; MoE allows {'None' if name == 'moe' else 0.0}")
        router = router if router is not None else RouterConfig()
        options = num_shared_experts, shared_intermediate_size, shared_gate, router
        self.hidden_size, self.intermediate_size, self.config = hidden_size, intermediate_size, config
        self.moe = MoEConfig(num_experts, top_k, *options)
        self.mlp_type = parse_enum(MLPType, mlp_type, "mlp_type")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.experts = Experts(hidden_size, intermediate_size, num_experts, self.mlp_type, config=config, **where)
        self.router = Linear(hidden_size, num_experts, router.bias, strategy=config.linear_strategy, **where)
        self.score_correction: nn.Parameter | None = None
        if router.score_correction:
            zeros = torch.zeros(num_experts, device=device, dtype=torch.float32)
            self.score_correction = nn.Parameter(zeros, requires_grad=False)
        self.shared_expert: FeedForward | None = None
        self.shared_gate: Linear | None = None
        if num_shared_experts:
            width = shared_intermediate_size or num_shared_experts * intermediate_size
            self.shared_expert = FeedForward(hidden_size, width, self.mlp_type, config=config, **where)
            if shared_gate:
                self.shared_gate = Linear(hidden_size, 1, False, strategy=config.linear_strategy, **where)
        self.register_load_state_dict_pre_hook(_translate)

    def forward(self, x: Tensor, *, return_router_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The mixture of x; with ``return_router_logits`` also the logits (tokens, num_experts), float32, in the order
        of x's tokens, as ``load_balancing_loss`` takes them."""
        check_tensor("x", x, "a tensor (..., hidden_size)")
        check_bool("return_router_logits", return_router_logits)
        if not x.dim() or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (..., hidden_size={self.hidden_size})")
        logits = self.router(x.to(torch.promote_types(x.dtype, torch.float32)))
        weights, experts = route(logits, self.moe.top_k, self.moe.router, self.score_correction)
        out = self.experts(x, experts, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_gate is not None:
                shared = self.shared_gate(x).sigmoid() * shared
            out = out + shared
        return (out, logits.reshape(-1, self.moe.num_experts)) if return_router_logits else out

    def extra_repr(self) -> str:
        return f"top_k={self.moe.top_k}, router={self.moe.router}"


@contextlib.contextmanager
def record_router_logits(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the router logits of every call of a ``MoE`` inside ``module`` while the block runs, in order.

    >>> with record_router_logits(model) as router_logits:
    ...     loss = model(input_ids, labels=labels).loss
    >>> loss = loss + 0.01 * load_balancing_loss(router_logits, num_experts, top_k, attention_mask)

    A forward pass that is run again for its gradients (activation checkpointing) is collected again only if the
    backward pass runs inside the block too.
    """
    check_type("module", module, nn.Module)
    found: list[Tensor] = []
    routers = [part.router for part in module.modules() if isinstance(part, MoE)]
    handles = [router.register_forward_hook(lambda _, __, logits: found.append(logits)) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def build_mlp(
    hidden_size: int,
    intermediate_size: int,
    mlp_type: str,
    config: MLPConfig,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> FeedForward | MoE:
    """The feed-forward that the options ask for: a mixture where ``config.moe`` is given.

    ``mlp_type`` "moe" is a mixture of "swiglu" experts, and needs ``config.moe``; another word is the experts' type.
    """
    check_type("config", config, MLPConfig)
    if mlp_type == "moe":
        if config.moe is None:
            raise ValueError("mlp_type is 'moe' and mlp has no moe; allowed: mlp=MLPConfig(moe=MoEConfig(...))")
        mlp_type = MLPType.SWIGLU
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    if config.moe is None:
        return FeedForward(hidden_size, intermediate_size, mlp_type, config=config, **where)
    moe = config.moe
    plain = MLPConfig(config.bias, strategy=config.strategy, linear_strategy=config.linear_strategy)
    return MoE(
        hidden_size,
        intermediate_size,
        moe.num_experts,
        moe.top_k,
        mlp_type,
        num_shared_experts=moe.num_shared_experts,
        shared_intermediate_size=moe.shared_intermediate_size,
        shared_gate=moe.shared_gate,
        router=moe.router,
        config=plain,
        **where,
    )


def _translate(module: MoE, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
    """Foreign names of a state dict become ours, and experts that came one by one are stacked."""
    for theirs, ours in _RENAMED.items():
        if prefix + theirs in state_dict:
            state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
    for key in [key for key in state_dict if key.startswith(f"{prefix}shared_experts.")]:
        state_dict[f"{prefix}shared_expert.{key.removeprefix(f'{prefix}shared_experts.')}"] = state_dict.pop(key)
    single: dict[tuple[str, str], dict[int, str]] = {}
    for key in state_dict:
        match = _EXPERT.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if match:
            single.setdefault((_PARTS[match[2]], match[3]), {})[int(match[1])] = key
    for kind in ("weight", "bias"):
        _stack(
            module.experts, state_dict, prefix, kind, {part: single.get((part, kind), {}) for part in _PARTS.values()}
        )


def _stack(
    experts: Experts, state_dict: dict[str, Tensor], prefix: str, kind: str, found: dict[str, dict[int, str]]
) -> None:
    if not any(found.values()):
        return
    parts = ("gate", "up", "down") if experts.mlp_type.is_gated else ("up", "down")
    for part in parts:
        missing = [number for number in range(experts.num_experts) if number not in found[part]]
        if missing:
            raise ValueError(f"state_dict has no {part} projection ({kind}) of the experts {missing} under {prefix!r}")
    suffix = "" if kind == "weight" else "_bias"
    for name, joined in ((experts.up_name, parts[:-1]), ("down_proj", ("down",))):
        whole = getattr(experts, name + suffix)
        if whole is None:
            continue  # the keys stay, and are reported as unexpected
        rows = [
            torch.cat([state_dict.pop(found[part][number]) for part in joined]) for number in range(experts.num_experts)
        ]
        if any(row.shape != whole.shape[1:] for row in rows):
            shapes = sorted({tuple(row.shape) for row in rows})
            raise ValueError(f"{prefix}experts: {'and '.join(joined)} have shapes {shapes}; allowed: {whole.shape[1:]}")
        state_dict[f"{prefix}experts.{name}{suffix}"] = torch.stack(rows)

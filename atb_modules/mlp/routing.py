"""Routing of a mixture of experts: its options, which experts serve a token with which weights, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from atb_modules.checks import check_bool, check_floating, check_int, check_positive, check_tensor, check_type
from atb_modules.strategies import parse_enum

_TINY = 1e-20


class RouterScoring(StrEnum):
    """How logits become scores of experts."""

    SOFTMAX = "softmax"  # over all experts, then the best are taken: Switch, Mixtral, Qwen-MoE
    TOP_K_SOFTMAX = "top_k_softmax"  # the best are taken, softmax over their logits alone: GPT-OSS
    SIGMOID = "sigmoid"  # each expert by itself: DeepSeek-V3


@dataclass(frozen=True)
class RouterConfig:
    """Options of a router.

    Args:
        scoring: a ``RouterScoring`` or its word.
        normalize: whether the weights of a token are divided by their sum (Mixtral always; ``norm_topk_prob``).
        scale: what the weights are multiplied with (``routed_scaling_factor``).
        bias: whether the router's product has a bias.
        score_correction: whether a number an expert is added to its score for the choice, not for the weight
            (``e_score_correction_bias``; Wang et al., 2024). It is kept as a parameter without a gradient.
        num_groups, top_groups: where given, only the experts of the best ``top_groups`` of ``num_groups`` equal
            groups can be chosen (DeepSeek-V2 and V3).
        group_experts: how many of a group's best scores are summed to rank it: 1 in DeepSeek-V2, 2 in V3.
    """

    scoring: RouterScoring | str = RouterScoring.SOFTMAX
    normalize: bool = True
    scale: float = 1.0
    bias: bool = False
    score_correction: bool = False
    num_groups: int | None = None
    top_groups: int | None = None
    group_experts: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "scoring", parse_enum(RouterScoring, self.scoring, "scoring"))
        for name in ("normalize", "bias", "score_correction"):
            check_bool(name, getattr(self, name))
        check_positive("scale", self.scale)
        check_int("num_groups", self.num_groups, optional=True)
        check_int("group_experts", self.group_experts)
        if (self.num_groups is None) != (self.top_groups is None):
            raise ValueError(f"num_groups is {self.num_groups} and top_groups {self.top_groups}; give both or none")
        if self.num_groups is not None:
            check_int("top_groups", self.top_groups, most=self.num_groups)

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Raises unless such a router can choose ``top_k`` of ``num_experts``."""
        check_int("num_experts", num_experts)
        check_int("top_k", top_k, most=num_experts)
        if self.num_groups is None or self.top_groups is None:
            return
        if num_experts % self.num_groups:
            raise ValueError(f"num_groups is {self.num_groups}; allowed: a divisor of num_experts {num_experts}")
        size = num_experts // self.num_groups
        if self.group_experts > size:
            raise ValueError(f"group_experts is {self.group_experts}; a group has {size} experts")
        if top_k > size * self.top_groups:
            raise ValueError(f"top_k is {top_k}; top_groups {self.top_groups} groups have {size} experts each")


@dataclass(frozen=True)
class MoEConfig:
    """What makes a feed-forward a mixture of experts.

    Args:
        num_experts: routed experts.
        top_k: how many of them serve a token.
        num_shared_experts: experts that serve every token, kept as one wide feed-forward (Dai et al., 2024).
        shared_intermediate_size: its channels; default num_shared_experts * intermediate_size.
        shared_gate: whether a sigmoid of the token weights what the shared experts return (Qwen2-MoE).
        router: a ``RouterConfig``.
    """

    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        check_type("router", self.router, RouterConfig)
        self.router.check_experts(self.num_experts, self.top_k)
        check_int("num_shared_experts", self.num_shared_experts, 0)
        check_int("shared_intermediate_size", self.shared_intermediate_size, optional=True)
        check_bool("shared_gate", self.shared_gate)
        if not self.num_shared_experts and (self.shared_intermediate_size is not None or self.shared_gate):
            name = "shared_gate" if self.shared_gate else "shared_intermediate_size"
            raise ValueError(f"{name} is {getattr(self, name)} with num_shared_experts 0; allowed: at least 1")


def route(
    router_logits: Tensor, top_k: int, config: RouterConfig | None = None, score_correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts a token: returns ``(weights, experts)``, both (..., top_k), best first.

    Args:
        router_logits: (..., num_experts), floating; scores are float32 (float64 for such logits).
        top_k: experts a token.
        config: a ``RouterConfig``.
        score_correction: (num_experts,), added to the scores for the choice alone.

    Raises:
        ValueError, TypeError: for what does not fit, naming the argument.
    """
    check_floating("router_logits", router_logits, "a tensor (..., num_experts)")
    check_type("config", config, RouterConfig, optional=True)
    config = config if config is not None else RouterConfig()
    if not router_logits.dim():
        raise ValueError("router_logits has no axis; allowed: (..., num_experts)")
    num_experts = router_logits.shape[-1]
    config.check_experts(num_experts, top_k)
    check_floating("score_correction", score_correction, "a tensor (num_experts,)", optional=True)
    if score_correction is not None and tuple(score_correction.shape) != (num_experts,):
        raise ValueError(
            f"score_correction has shape {tuple(score_correction.shape)}; router_logits allow ({num_experts},)"
        )
    logits = router_logits.to(torch.promote_types(router_logits.dtype, torch.float32))
    if config.scoring is RouterScoring.SIGMOID:
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1) if config.scoring is RouterScoring.SOFTMAX else logits
    experts = _best(scores.detach(), top_k, config, score_correction)
    weights = scores.gather(-1, experts)
    if config.scoring is RouterScoring.TOP_K_SOFTMAX:
        weights = weights.softmax(-1)
    elif config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights if config.scale == 1.0 else weights * config.scale, experts


def _best(scores: Tensor, top_k: int, config: RouterConfig, correction: Tensor | None) -> Tensor:
    """The experts of the highest (corrected) scores, within the best groups where there are groups."""
    if correction is not None:
        scores = scores + correction.detach().to(scores.dtype)
    if config.num_groups is not None and config.top_groups is not None:
        grouped = scores.unflatten(-1, (config.num_groups, -1))
        ranks = grouped.topk(config.group_experts, dim=-1).values.sum(-1)
        chosen = ranks.topk(config.top_groups, dim=-1).indices
        live = torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, chosen, True)
        scores = grouped.masked_fill(~live.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(top_k, dim=-1).indices


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor],
    num_experts: int,
    top_k: int,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """``num_experts * sum_e f_e P_e``: f_e the tokens that chose expert e (as a share of all tokens, so that they sum
    to top_k), P_e its mean probability (Switch Transformer, equations 4 to 6; Fedus et al., 2021).

    Args:
        router_logits: (..., num_experts) of one layer, or one such tensor a layer; all tokens count alike.
        attention_mask: (batch, seq) of bool or 0/1, 1 = counts; as many entries as a layer has tokens.

    Returns:
        A float32 number, differentiable in the logits through P alone; 0 where no token counts.
    """
    if not isinstance(router_logits, (Tensor, Sequence)):
        kind = type(router_logits).__name__
        raise TypeError(f"router_logits is {kind}; allowed: a tensor (..., num_experts), or a sequence of them")
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    if not layers:
        raise ValueError("router_logits is empty; allowed: one tensor (..., num_experts) a layer")
    RouterConfig().check_experts(num_experts, top_k)
    for index, logits in enumerate(layers):
        check_floating(f"router_logits[{index}]", logits, "a tensor (..., num_experts)")
        if logits.dim() < 1 or logits.shape[-1] != num_experts:
            raise ValueError(
                f"router_logits[{index}] has shape {tuple(logits.shape)}; allowed: (..., num_experts={num_experts})"
            )
    first = layers[0]
    counts = torch.zeros(num_experts, dtype=torch.float32, device=first.device)
    mass, tokens = torch.zeros_like(counts), torch.zeros((), dtype=torch.float32, device=first.device)
    for index, logits in enumerate(layers):
        flat = logits.reshape(-1, num_experts).to(first.device)
        real = _real_tokens(attention_mask, flat, index)
        probabilities = flat.float().softmax(-1) * real.unsqueeze(-1)
        chosen = flat.detach().softmax(-1).topk(top_k, dim=-1).indices
        # A one-hot sum and not a scatter: it is the same on every run on every device.
        counts = counts + (_one_hot(chosen, num_experts) * real.unsqueeze(-1)).sum(0)
        mass, tokens = mass + probabilities.sum(0), tokens + real.sum()
    tokens = tokens.clamp(min=1.0)
    return num_experts * ((counts / tokens) * (mass / tokens)).sum()


def _one_hot(chosen: Tensor, num_experts: int) -> Tensor:
    """(tokens, num_experts) float32: 1 where a token chose the expert."""
    empty = torch.zeros(chosen.shape[0], num_experts, dtype=torch.float32, device=chosen.device)
    return empty.scatter(-1, chosen, 1.0)


def _real_tokens(mask: Tensor | None, flat: Tensor, index: int) -> Tensor:
    if mask is None:
        return torch.ones(flat.shape[0], dtype=torch.float32, device=flat.device)
    check_tensor("attention_mask", mask, "a tensor (batch, seq) or None")
    if mask.numel() != flat.shape[0]:
        raise ValueError(
            f"attention_mask has {mask.numel()} entries; router_logits[{index}] has {flat.shape[0]} tokens"
        )
    return (mask.reshape(-1) != 0).to(flat.device, torch.float32)

"""Feed-forward networks: gated (SwiGLU, GeGLU), plain (GELU, ReLU2), and mixtures of experts."""

from atb_modules.mlp.experts import moe
from atb_modules.mlp.feed_forward import FeedForward, MLPConfig, MLPType
from atb_modules.mlp.functional import activation, gated_activation
from atb_modules.mlp.moe import Experts, MoE, build_mlp, record_router_logits
from atb_modules.mlp.routing import MoEConfig, RouterConfig, RouterScoring, load_balancing_loss, route

__all__ = [
    "Experts",
    "FeedForward",
    "MLPConfig",
    "MLPType",
    "MoE",
    "MoEConfig",
    "RouterConfig",
    "RouterScoring",
    "activation",
    "build_mlp",
    "gated_activation",
    "load_balancing_loss",
    "moe",
    "record_router_logits",
    "route",
]

"""Where a weight with a canonical name lives in a DecoderModel: a parameter, or rows of a fused one."""

from __future__ import annotations

from torch import Tensor

from atb_modules.convert.family import canonical_names

from .config import ModelConfig
from .decoder import DecoderModel

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def _rows(config: ModelConfig, part: str, width: int) -> slice:
    """Output channels of a part in its fused weight; ``width`` are those of the gate."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": slice(0, q),
        "k_proj": slice(q, q + kv),
        "v_proj": slice(q + kv, q + 2 * kv),
        "gate_proj": slice(0, width),
        "up_proj": slice(width, 2 * width),
    }[part]


def weight_slots(model: DecoderModel) -> dict[str, Tensor]:
    """Every weight of the model by its canonical name: the parameter's memory itself, or a view into a fused
    one.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    slots = {}
    for name in canonical_names(model.config):
        module, part, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
        mixture, _, number = module.rpartition(".")
        if mixture.endswith(".experts"):
            suffix = "" if kind == "weight" else "_bias"
            whole = parameters[f"{mixture}.{_FUSED.get(part, part)}{suffix}"].detach()[int(number)]
            slots[name] = whole[_rows(model.config, part, model.config.expert_size)] if part in _FUSED else whole
        elif part in _FUSED:
            whole = parameters[f"{module}.{_FUSED[part]}.{kind}"]
            slots[name] = whole.detach()[_rows(model.config, part, model.config.intermediate_size)]
        else:
            slots[name] = parameters[name].detach()
    return slots

"""config.json of a ModelConfig, as transformers has it for the family: what `atb_modules.convert` reads, backwards."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch

from atb_modules.attention.rope import RotaryConfig, RotaryEmbedding
from atb_modules.attention.rope_scaling import RopeScalingKind, RotaryScaling
from atb_modules.convert.families import FAMILIES
from atb_modules.convert.source import ConfigSource

from .config import ModelConfig

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Compared by what they compute, not by how they are written.
_BY_MEANING = ("family", "rotary", "attention_scale", "max_positions", "moe_intermediate_size")


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The values of a config.json that transformers and `load_model` read as `config`.

    Raises:
        ValueError: the family is unknown, or a field of `config` has a value that its config.json cannot express.
    """
    if config.family not in FAMILIES:
        raise ValueError(f"config.family is {config.family!r}; allowed: {', '.join(FAMILIES)}")
    family = config.family
    if family == "llama" and any(window is not None for window in config.windows):
        family = "mistral"  # the same weights under the same names, and it has a window
    values = _common(config, family, dtype)
    if family == "gemma3":
        values |= _gemma3(config)
    else:
        values |= {"hidden_act": _activation(config), **_one_rotary(config)}
    if family in ("llama", "qwen3", "qwen3_moe"):
        values["attention_bias"] = config.output_bias
    if family == "llama":
        values["mlp_bias"] = config.mlp_bias
    elif family in ("mistral", "mixtral"):
        values["sliding_window"] = _sliding_window(config)
    elif family in ("qwen2", "qwen3"):
        values |= _switched_windows(config)
    elif family == "qwen3_moe":
        values |= {"sliding_window": _sliding_window(config), "use_sliding_window": _sliding_window(config) is not None}
    if family in ("mixtral", "qwen3_moe"):
        values |= _mixture(config)
    _check_reads_back(config, family, values)
    return values


def _common(config: ModelConfig, family: str, dtype: torch.dtype) -> dict[str, Any]:
    model_type, architecture = _CLASSES[family]
    ends = list(config.eos_token_ids)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": _trained_positions(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": None,
    }


def _trained_positions(config: ModelConfig) -> int:
    """Dynamic NTK takes max_position_embeddings for the trained length; we read `factor` times as many from it."""
    lengths = (_dynamic_length(rotary.scaling) for rotary in config.rotary)
    return max((length for length in lengths if length), default=config.max_positions)


def _dynamic_length(scaling: RotaryScaling | None) -> int | None:
    return scaling.original_max_positions if scaling and scaling.kind is RopeScalingKind.DYNAMIC else None


def _activation(config: ModelConfig) -> str:
    if config.mlp_type not in _ACTIVATIONS:
        raise _refused("mlp_type", config.mlp_type, f"allowed: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[config.mlp_type]


def _sliding_window(config: ModelConfig) -> int | None:
    return next((window + 1 for window in config.windows if window is not None), None)


def _layer_types(config: ModelConfig) -> list[str]:
    return [_GLOBAL if window is None else _LOCAL for window in config.windows]


def _switched_windows(config: ModelConfig) -> dict[str, Any]:
    kinds = _layer_types(config)
    return {
        "use_sliding_window": _LOCAL in kinds,
        "sliding_window": _sliding_window(config),
        "max_window_layers": kinds.index(_LOCAL) if _LOCAL in kinds else config.num_layers,
        "layer_types": kinds,
    }


def _mixture(config: ModelConfig) -> dict[str, Any]:
    if config.moe is None:
        raise _refused("moe", None, "allowed: a MoEConfig")
    values: dict[str, Any] = {"num_local_experts": config.moe.num_experts, "num_experts_per_tok": config.moe.top_k}
    if config.family == "qwen3_moe":
        values |= {
            "num_experts": config.moe.num_experts,  # as older versions of transformers have it
            "norm_topk_prob": config.moe.router.normalize,
            "moe_intermediate_size": config.expert_size,
            "mlp_only_layers": list(config.dense_layers),
            "decoder_sparse_step": 1,
        }
    return values


def _scale(config: ModelConfig) -> float:
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    kinds = _layer_types(config)
    if config.attention_softcap is not None:
        raise _refused("attention_softcap", config.attention_softcap, "transformers' Gemma 3 does not apply it")
    if not _scale(config) > 0:
        raise _refused("attention_scale", config.attention_scale, "allowed: a positive number")
    scalar = _scale(config) ** -2
    parameters = {kind: _rope_parameters(config, config.rotary[kinds.index(kind)]) for kind in sorted(set(kinds))}
    values: dict[str, Any] = {
        "hidden_activation": _activation(config),
        "attention_bias": config.output_bias,
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar,
        "sliding_window": _sliding_window(config) or 4096,
        "layer_types": kinds,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": config.logit_softcap,
        "rope_parameters": parameters,
    }
    # The older form of the same thing, for older versions of transformers.
    for kind, key in ((_GLOBAL, "rope_theta"), (_LOCAL, "rope_local_base_freq")):
        if kind in parameters:
            values[key] = parameters[kind]["rope_theta"]
    if parameters.get(_GLOBAL, {}).get("rope_type", "default") != "default":
        values["rope_scaling"] = {k: v for k, v in parameters[_GLOBAL].items() if k != "rope_theta"}
    return values


def _one_rotary(config: ModelConfig) -> dict[str, Any]:
    """The setting that all layers share, in the newer form and, for older versions of transformers, in the older."""
    parameters = _rope_parameters(config, config.rotary[0])
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
    }


def _rope_parameters(config: ModelConfig, rotary: RotaryConfig) -> dict[str, Any]:
    scaling = rotary.scaling
    if rotary.partial_factor != 1.0:
        raise _refused("rotary", rotary, "transformers rotates whole heads in this family (partial_factor 1.0)")
    if rotary.frequency_factors is not None:
        if scaling is not None:
            raise _refused("rotary", rotary, "allowed: scaling or frequency_factors, not both")
        # Divisors of the frequencies that hold for every length, as LongRoPE has them.
        factors = rotary.frequency_factors
        scaling = RotaryScaling(
            "longrope",
            original_max_positions=config.max_positions,
            attention_factor=1.0,
            short_factor=factors,
            long_factor=factors,
        )
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if scaling is None:
        return values
    kind = RopeScalingKind(scaling.kind)
    values |= {"rope_type": kind.value, "factor": scaling.factor}
    if kind in (RopeScalingKind.LINEAR, RopeScalingKind.DYNAMIC):
        return values
    values["original_max_position_embeddings"] = scaling.original_max_positions
    names = {
        RopeScalingKind.LLAMA3: ("low_freq_factor", "high_freq_factor"),
        RopeScalingKind.YARN: ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
        RopeScalingKind.LONGROPE: ("attention_factor", "short_factor", "long_factor"),
    }[kind]
    for name in names:
        value = getattr(scaling, name)
        if value is not None:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


def _check_reads_back(config: ModelConfig, family: str, values: dict[str, Any]) -> None:
    """Raises a ValueError naming the first field that would not come back from `values`."""
    source = ConfigSource(values, f"config.json of family {family!r}")
    try:
        back = FAMILIES[family].config(source)
    except ValueError as error:
        raise ValueError(f"config cannot be written as a config.json: {error}") from None
    for field in fields(ModelConfig):
        ours, theirs = getattr(config, field.name), getattr(back, field.name)
        if field.name not in _BY_MEANING and ours != theirs:
            raise _refused(field.name, ours, f"a config.json of family {family!r} would read back {theirs!r}")
    if config.expert_size != back.expert_size:
        raise _refused("moe_intermediate_size", config.expert_size, f"family {family!r} would read {back.expert_size}")
    ours, theirs = _scale(config), _scale(back)
    if not math.isclose(ours, theirs, rel_tol=1e-6):
        raise _refused("attention_scale", ours, f"a config.json of family {family!r} would read back {theirs}")
    for layer, (one, other) in enumerate(zip(config.rotary, back.rotary, strict=True)):
        if one != other and not _same_rotation(config, one, other):
            raise _refused(f"rotary[{layer}]", one, f"a config.json of family {family!r} would read back {other}")


def _same_rotation(config: ModelConfig, one: RotaryConfig, other: RotaryConfig) -> bool:
    """Whether both turn every position alike, to the rounding of their numbers."""
    tables = [RotaryEmbedding(config.head_dim, rotary) for rotary in (one, other)]
    lengths = {1, config.max_positions}
    for rotary in (one, other):
        if rotary.scaling is not None and rotary.scaling.original_max_positions:
            trained = rotary.scaling.original_max_positions
            lengths |= {trained, trained + 1, 2 * trained}
    same = one.layout == other.layout and tables[0].rotary_dim == tables[1].rotary_dim
    return same and all(
        math.isclose(a, b, rel_tol=1e-9)
        for length in lengths
        for a, b in zip(
            (*tables[0].frequencies(length), tables[0].attention_factor),
            (*tables[1].frequencies(length), tables[1].attention_factor),
            strict=True,
        )
    )


def _refused(name: str, value: object, why: str) -> ValueError:
    return ValueError(
        f"config.{name} is {value!r:.200}, which cannot be written as a config.json: {why} "
        "(family_state_dict gives the weights alone)"
    )

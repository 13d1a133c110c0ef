"""What an attention module is given, checked at its edge: options when it is built, tensors when it is called."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atb_modules.attention.cache import CacheStep, KVCacheManager
from atb_modules.attention.cache.refusal import check_heads
from atb_modules.attention.config import AttentionConfig
from atb_modules.attention.rope import INTEGERS, RotaryConfig
from atb_modules.checks import check_bool, check_floating, check_int, check_tensor, check_type
from atb_modules.spec import AttentionSpec


def check_options(cross: object, rotary: object, config: object, layer_idx: object) -> None:
    """Raises where an option of ``Attention`` is of the wrong kind."""
    check_bool("cross", cross)
    check_type("rotary", rotary, RotaryConfig, optional=True)
    check_type("config", config, AttentionConfig, optional=True)
    check_int("layer_idx", layer_idx, least=0, optional=True)


def check_call(hidden_states: Tensor, dims: tuple[int, ...]) -> None:
    """Raises unless hidden_states is a tensor of so many axes."""
    check_tensor("hidden_states", hidden_states, "a tensor (batch, seq, hidden)")
    if hidden_states.dim() not in dims:
        packed = ", or packed (tokens, hidden) with a cache_step" if 2 in dims else ""
        raise ValueError(f"hidden_states has shape {tuple(hidden_states.shape)}; allowed: (batch, seq, hidden){packed}")


def check_cached_call(
    hidden_states: Tensor,
    kv_cache: KVCacheManager,
    step: CacheStep | None,
    num_kv_heads: int,
    head_dim: int,
    spec: AttentionSpec,
) -> None:
    """Raises unless the call, padded or packed, and its step go with the cache."""
    check_heads(kv_cache, num_kv_heads, head_dim)
    if spec.block_size is not None:
        raise ValueError(
            "kv_cache is given; a layer with mode 'block_sparse' has a layout of fixed lengths, and no cache"
        )
    check_call(hidden_states, (2, 3))
    if kv_cache.device != hidden_states.device:
        raise ValueError(f"kv_cache is on {kv_cache.device}; hidden_states is on {hidden_states.device}")
    if step is not None:
        kv_cache.check_step("cache_step", step)
    elif hidden_states.dim() == 2:
        raise ValueError("hidden_states is packed (tokens, hidden) without a cache_step; allowed: (batch, seq, hidden)")


def check_prefix(spec: AttentionSpec, step: CacheStep) -> None:
    """Raises where a step begins inside the prefix: tokens before it have been computed without seeing it."""
    if not spec.prefix:
        return
    new = step.cu_seqlens_q.diff()
    past = step.kv_lengths - new
    if bool(((past > 0) & (past < spec.prefix) & (new > 0)).any()):
        raise ValueError(
            f"kv_cache holds {past.tolist()} tokens a row; prefix_length {spec.prefix} needs its prefix in one call"
        )


def packed_positions(position_ids: Tensor, hidden_states: Tensor, real: Tensor | None) -> Tensor:
    """Positions of the packed hidden_states, where they came padded those of the ``real`` (batch, seq) alone."""
    if real is None:
        check_positions(position_ids, tuple(hidden_states.shape[:1]))
        return position_ids
    check_positions(position_ids, tuple(real.shape))
    return position_ids.expand(real.shape)[real]


def check_positions(position_ids: Tensor, shape: tuple[int, ...]) -> None:
    """Raises unless position_ids are integers for the tokens of ``shape``, (batch, seq) or packed (tokens,)."""
    check_tensor("position_ids", position_ids, "a tensor of integers")
    if position_ids.dtype not in INTEGERS:
        raise TypeError(f"position_ids is {position_ids.dtype}; allowed: {', '.join(map(str, INTEGERS))}")
    allowed = [shape[-1:], (1, *shape[1:]), shape] if len(shape) == 2 else [shape]
    if tuple(position_ids.shape) not in allowed:
        words = " or ".join(str(tuple(one)) for one in dict.fromkeys(allowed))
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; allowed: {words}, one a token")


def check_key_values(
    states: Any,
    hidden_states: Tensor,
    num_kv_heads: int,
    head_dim: int,
    width: int | None = None,
    name: str = "key_value_states",
) -> None:
    """Raises unless ``states``, the argument ``name``, goes with hidden_states as the other sequence.

    It is (batch, seq, channels), ``width`` of them where that is known, or a pair of keys and values of such heads.
    """
    batch = hidden_states.shape[0]
    parts: dict[str, Any] = {name: states}
    if isinstance(states, Tensor):
        channels = "kv_hidden_size" if width is None else str(width)
        if states.dim() != 3 or states.shape[0] != batch or width not in (None, states.shape[2]):
            raise ValueError(f"{name} has shape {tuple(states.shape)}; allowed: ({batch}, seq, {channels})")
    elif not isinstance(states, (tuple, list)) or len(states) != 2:
        raise TypeError(
            f"{name} is {type(states).__name__}; allowed: a tensor (batch, seq, kv_hidden_size), or the pair that "
            "project_keys_values returned"
        )
    else:
        parts = dict(zip((f"{name}' keys", f"{name}' values"), states, strict=True))
        for what, part in parts.items():
            check_tensor(what, part, f"a tensor (batch, seq, {num_kv_heads}, {head_dim})")
            if part.dim() != 4 or part.shape[0] != batch or tuple(part.shape[2:]) != (num_kv_heads, head_dim):
                raise ValueError(
                    f"{what} have shape {tuple(part.shape)}; allowed: ({batch}, seq, {num_kv_heads}, {head_dim})"
                )
        keys, values = states
        if keys.shape[1] != values.shape[1]:
            raise ValueError(f"{name}' keys have {keys.shape[1]} tokens and values {values.shape[1]}; must be equal")
    for what, part in parts.items():
        check_floating(what, part)
        if part.device != hidden_states.device:
            raise ValueError(f"{what} is on {part.device}; hidden_states is on {hidden_states.device}")


def check_rotary_tables(rotary_tables: object, tokens: int | None = None) -> None:
    """Raises unless rotary_tables is a pair of tensors, (tokens, rotary_dim / 2) where ``tokens`` are packed."""
    if not isinstance(rotary_tables, (tuple, list)) or len(rotary_tables) != 2:
        raise TypeError(f"rotary_tables is {type(rotary_tables).__name__}; allowed: the pair (cos, sin)")
    cos, sin = rotary_tables
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor):
        names = f"{type(cos).__name__} and {type(sin).__name__}"
        raise TypeError(f"rotary_tables are {names}; allowed: the tensors cos and sin")
    if tokens is not None and not (cos.dim() == sin.dim() == 2 and cos.size(0) == sin.size(0) == tokens):
        raise ValueError(
            f"rotary_tables have shapes {tuple(cos.shape)} and {tuple(sin.shape)}; allowed: ({tokens}, rotary_dim / 2) "
            "for both"
        )


def check_packed(hidden_states: Tensor, step: CacheStep | None, rotary_tables: object) -> None:
    """Raises unless the step and the tables, where they are given, have as many tokens as the packed hidden_states."""
    tokens = hidden_states.size(0)
    if step is not None and step.positions.size(0) != tokens:
        raise ValueError(f"hidden_states has {tokens} packed tokens; cache_step has {step.total_tokens}")
    if rotary_tables is not None:
        check_rotary_tables(rotary_tables, tokens)

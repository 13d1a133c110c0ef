"""The door into Hugging Face transformers: ``attn_implementation="atb"`` in models written there.

    import transformers
    import atb_modules                              # registers "atb", because transformers is there already

    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="atb")
    model.set_attn_implementation("atb")            # or later

Where transformers is imported after atb_modules, call ``register()`` once.

Masks arrive as ``StructuredMask`` (see ``transformers_masks``), so that no query length by key length mask is made for
causality, windows, chunks, packed sequences, images and padding. A mask that has no compact form is made dense and
logged on ``atb_modules.integrations``. What cannot be served raises a ValueError that names it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atb_modules.attention.functional import attention
from atb_modules.integrations.transformers_masks import StructuredMask, log_once, structured_mask
from atb_modules.integrations.transformers_pages import CachedStates
from atb_modules.spec import AttentionSpec

NAME = "atb"

#: arguments that change what attention computes, and that we do not compute
_REFUSED = {
    "output_attentions": "attention weights are never formed; use attn_implementation='eager'",
    "head_mask": "heads cannot be masked",
    "indices": "keys chosen one by one for each query",
    "block_indices": "blocks of keys chosen for each query",
    "sinks": "sinks of each token; s_aux is one a head",
    "attention_similarity": "an additive mask by another name; pass it as attention_mask",
    "block_table": "pages of transformers' continuous batching",
}
#: arguments of forward() that models hand down and that no attention function reads
_NO_CONCERN = frozenset(
    (
        "cache",
        "cache_position",
        "deterministic",
        "inputs_embeds",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "max_seqlen_k",
        "max_seqlen_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    )
)


def register() -> None:
    """Register "atb" as an attention implementation of transformers, and how its masks are made; may be repeated.

    Raises:
        ImportError: transformers is not installed, or has no ``AttentionInterface`` and ``AttentionMaskInterface``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, structured_mask)


def register_if_possible() -> None:
    """``register()``, with a warning in the log where transformers has no such registries."""
    try:
        register()
    except ImportError as error:
        log_once(f"attn_implementation={NAME!r} is not registered: {error}")


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    attention_mask: StructuredMask | Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it; the registry's AUTO strategy chooses the kernel.

    Args:
        module: the calling attention module; its ``is_causal`` counts where nothing else says it.
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim), or both in the pages of a ``PagedCache``; they are not repeated
            for grouped heads.
        attention_mask: a ``StructuredMask``; a tensor that broadcasts to (batch, heads, q_len, kv_len), bool (True =
            may attend) or floating (added); or None.
        dropout, scaling, softcap: as in transformers; scaling None is ``1 / sqrt(head_dim)``.
        is_causal, sliding_window: read where attention_mask is None, for a mask says all of this itself. As in
            transformers' ``sdpa``, query 0 then sees key 0 alone and a single query sees every key; the window of W
            is W - 1 keys before the query and, if not causal, as many after it.
        s_aux: (heads,) sinks.
        position_bias: floating, broadcasts to (batch, heads, q_len, kv_len), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: (segments + 1,), where each sequence of a packed batch of one row begins.

    Returns:
        (batch, q_len, heads, head_dim) and None.

    Raises:
        ValueError: an argument that changes the result and is not known here, by name.
    """
    _check_others(module, kwargs)
    batch, q_len = max(query.shape[0], key.shape[0]), query.shape[2]
    query = query.expand(batch, -1, -1, -1)
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    if isinstance(key, CachedStates):
        plain = not dropout and position_bias is None and cu_seq_lens_q is None and cu_seq_lens_k is None
        out = key.update.attend(query, attention_mask, scaling, softcap, s_aux) if plain else None
        if out is not None:
            return out, None
        key, value = key.update.dense
    starts_q, starts_k = _packed_starts(attention_mask, cu_seq_lens_q, cu_seq_lens_k)
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        attention_mask = _default_mask(query, key, causal, sliding_window, packed=starts_q is not None)
    if isinstance(attention_mask, StructuredMask) and position_bias is not None and starts_q is not None and batch > 1:
        attention_mask, starts_q, starts_k = attention_mask.dense(), None, None
    structure, mask = _taken_apart(attention_mask, query, key)
    images = structure.images
    begin, end = structure.keys
    key, value = key[:, :, begin:end], value[:, :, begin:end]
    if position_bias is not None:
        mask = _joined_bias(position_bias[..., begin:end], mask)
    in_one_row = starts_q is not None and batch > 1
    if in_one_row:
        query, key, value = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (query, key, value))
        images = None if images is None else images.reshape(1, -1)
        mask = None if mask is None else mask.reshape(1, 1, 1, -1)
    spec = AttentionSpec(
        causal=structure.causal, window=structure.window, chunk=structure.chunk, scale=scaling, softcap=softcap
    )
    out, _ = attention(
        query,
        key,
        value,
        spec,
        mask=mask,
        sinks=s_aux,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        image_ids=images,
        dropout_p=float(dropout),
    )
    if in_one_row:
        out = out[0].unflatten(1, (batch, q_len)).transpose(0, 1)
    return out.transpose(1, 2).contiguous(), None


def _default_mask(
    query: Tensor, key: Tensor, causal: bool, sliding_window: int | None, packed: bool
) -> StructuredMask | Tensor:
    """What no mask means: as in transformers' sdpa, causality from the first key on, and a single query sees all."""
    (batch, _, q_len, _), kv_len = query.shape, key.shape[2]
    window = None
    if sliding_window is not None and sliding_window < kv_len:
        window = (sliding_window - 1, None if causal else sliding_window - 1)
    if causal and q_len > kv_len and not packed:
        if window is not None:
            raise ValueError(f"sliding_window is {sliding_window} for {q_len} queries of {kv_len} keys without a mask")
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril()
    first_keys = causal and q_len > 1 and not packed
    return StructuredMask((batch, 1, q_len, kv_len), causal, (0, q_len if first_keys else kv_len), window=window)


def _taken_apart(mask: StructuredMask | Tensor, query: Tensor, key: Tensor) -> tuple[StructuredMask, Tensor | None]:
    """Structure, and what remains for a tensor: padding, or the whole mask."""
    (batch, _, q_len, _), kv_len = query.shape, key.shape[2]
    if not isinstance(mask, StructuredMask):
        return StructuredMask((batch, 1, q_len, kv_len), False, (0, kv_len)), mask
    rows_matter = mask.padding is not None or mask.cu_seqlens is not None or mask.images is not None
    if mask.shape[2:] != (q_len, kv_len) or (rows_matter and mask.shape[0] != batch):
        raise ValueError(
            f"attention_mask is for batch {mask.shape[0]}, {mask.shape[2]} queries and {mask.shape[3]} keys; query is "
            f"{tuple(query.shape)} and key is {tuple(key.shape)}"
        )
    return mask, None if mask.padding is None else mask.padding[:, None, None, :]


def _check_others(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise for arguments that would change the result; name unknown ones in the log."""
    for name, given in others.items():
        if given is None or given is False or name in _NO_CONCERN:
            continue
        if name in _REFUSED:
            raise ValueError(f"{name} is given, and attn_implementation='atb' cannot serve it: {_REFUSED[name]}")
        log_once(f"{type(module).__name__} passes {name!r} to attention, which attn_implementation='atb' does not read")
    if getattr(getattr(module, "config", None), "output_attentions", False):
        raise ValueError(
            f"config.output_attentions is True, and attn_implementation='atb' cannot serve it: "
            f"{_REFUSED['output_attentions']}"
        )


def _packed_starts(
    mask: StructuredMask | Tensor | None, starts_q: Tensor | None, starts_k: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """cu_seqlens of queries and of keys: those given, which must fit what the mask says, or the mask's."""
    own = mask.cu_seqlens if isinstance(mask, StructuredMask) else None
    if starts_q is None and starts_k is None:
        return own, own
    hides = isinstance(mask, StructuredMask) and (mask.padding is not None or mask.keys != (0, mask.shape[-1]))
    if isinstance(mask, Tensor) or hides:
        raise ValueError("cu_seq_lens_q is given beside an attention_mask that hides keys; allowed: one of them")
    for name, starts in (("cu_seq_lens_q", starts_q), ("cu_seq_lens_k", starts_k)):
        if starts is None:
            raise ValueError(f"{name} is None; allowed: cu_seq_lens_q and cu_seq_lens_k, or neither")
        if own is not None and starts.tolist() != own.tolist():
            raise ValueError(f"{name} is {starts.tolist()}; position_ids say {own.tolist()}, they must be equal")
    assert starts_q is not None and starts_k is not None
    return starts_q.int(), starts_k.int()


def _joined_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """One additive mask of a bias and a mask, bool or additive."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, float("-inf"))
    return bias + mask

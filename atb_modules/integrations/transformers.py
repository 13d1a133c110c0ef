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
from atb_modules.spec import AttentionSpec, Causal

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
    "cache cache_position deterministic inputs_embeds labels layer_idx logits_to_keep max_length_k max_length_q "
    "max_seqlen_k max_seqlen_q mm_token_type_ids num_items_in_batch output_hidden_states output_router_logits "
    "past_key_value past_key_values position_embeddings position_ids return_dict seq_idx token_type_ids use_cache".split()
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
    key: Tensor,
    value: Tensor,
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
        key, value: (batch, kv_heads, kv_len, head_dim); they are not repeated for grouped heads.
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
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    if query.shape[0] == 1 < key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    causal: Causal = Causal.NONE
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None
    mask: Tensor | None = None
    starts_q = starts_k = images = None
    if (
        isinstance(attention_mask, StructuredMask)
        and position_bias is not None
        and attention_mask.cu_seqlens is not None
    ):
        attention_mask = attention_mask.dense()
    if isinstance(attention_mask, StructuredMask):
        _check_sizes(attention_mask, query, key)
        causal = Causal.BOTTOM_RIGHT if attention_mask.causal else Causal.NONE
        window, chunk, images = attention_mask.window, attention_mask.chunk, attention_mask.images
        starts_q = starts_k = attention_mask.cu_seqlens
        if attention_mask.padding is not None:
            mask = attention_mask.padding[:, None, None, :]
        begin, end = attention_mask.keys
        if (begin, end) != (0, kv_len):
            key, value = key[:, :, begin:end], value[:, :, begin:end]
            position_bias = None if position_bias is None else position_bias[..., begin:end]
    elif attention_mask is not None:
        mask = attention_mask
    else:
        wants_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        packed = cu_seq_lens_q is not None
        if wants_causal and (q_len > 1 or packed):
            causal = Causal.TOP_LEFT if q_len != kv_len and not packed else Causal.BOTTOM_RIGHT
        if sliding_window is not None and sliding_window < kv_len:
            window = (sliding_window - 1, None if wants_causal else sliding_window - 1)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        _check_packed(attention_mask, cu_seq_lens_q, cu_seq_lens_k)
        starts_q = None if cu_seq_lens_q is None else cu_seq_lens_q.int()
        starts_k = None if cu_seq_lens_k is None else cu_seq_lens_k.int()
    if position_bias is not None:
        mask = _joined_bias(position_bias, mask)
    batch = query.shape[0]
    in_one_row = starts_q is not None and batch > 1
    if in_one_row:
        query, key, value = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (query, key, value))
        images = None if images is None else images.reshape(1, -1)
        mask = None if mask is None else mask.reshape(1, 1, 1, -1)
    out, _ = attention(
        query,
        key,
        value,
        AttentionSpec(causal=causal, window=window, chunk=chunk, scale=scaling, softcap=softcap),
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


def _check_sizes(mask: StructuredMask, query: Tensor, key: Tensor) -> None:
    batch, _, q_len, kv_len = mask.shape
    fits = batch == query.shape[0] or (mask.padding is None and mask.cu_seqlens is None and mask.images is None)
    if not fits or q_len != query.shape[2] or kv_len != key.shape[2]:
        raise ValueError(
            f"attention_mask is for batch {batch}, {q_len} queries and {kv_len} keys; query is {tuple(query.shape)} and "
            f"key is {tuple(key.shape)}"
        )


def _check_packed(mask: StructuredMask | Tensor | None, starts_q: Tensor | None, starts_k: Tensor | None) -> None:
    """cu_seq_lens beside a mask: it must say nothing of keys itself, or the same."""
    if mask is None:
        return
    if isinstance(mask, Tensor) or mask.padding is not None or mask.keys != (0, mask.shape[-1]):
        raise ValueError("cu_seq_lens_q is given beside an attention_mask that hides keys; allowed: one of them")
    if mask.cu_seqlens is not None:
        for name, starts in (("cu_seq_lens_q", starts_q), ("cu_seq_lens_k", starts_k)):
            if starts is None or starts.tolist() != mask.cu_seqlens.tolist():
                raise ValueError(
                    f"{name} is {None if starts is None else starts.tolist()}; position_ids say "
                    f"{mask.cu_seqlens.tolist()}, they must be equal"
                )


def _joined_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """One additive mask of a bias and a mask, bool or additive."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, float("-inf"))
    return bias + mask

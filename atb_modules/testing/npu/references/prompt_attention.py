"""npu_prompt_flash_attention: attention over whole prompts, the one that the inference chip 310P has, too.

Docs, the formula: "atten_out = softmax(scale * (Q * K) + atten_mask) * V".
"""

from __future__ import annotations

import torch
from torch import Tensor

from atb_modules.testing.npu.binding import require
from atb_modules.testing.npu.references.attention_math import (
    attend,
    join_sequences,
    require_compressed,
    split_sequences,
    structure,
)
from atb_modules.testing.npu.references.registry import reference
from atb_modules.testing.npu.references.rules import (
    HALVES,
    is_310p,
    is_950,
    require_contiguous,
    require_dtype,
    require_same_dtype,
)

_FAR = 2147483647
_LAYOUTS = {"BSH": 3, "BSND": 4, "BNSD": 4}


@reference("npu::npu_prompt_flash_attention")
def prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = _FAR,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
) -> Tensor:
    """Docs: "query, key and value of one data type, not contiguous ones are not supported"; "atten_mask (Q_S, KV_S),
    (B, Q_S, KV_S), (1, Q_S, KV_S), (B, 1, Q_S, KV_S), (1, 1, Q_S, KV_S)"; "sparse_mode 0 without atten_mask ignores
    pre_tokens and next_tokens; with it, the part between them is computed" (note that next_tokens is 0 by default);
    "modes 2, 3 and 4 take the compressed mask"; "num_key_value_heads 0: as many as of query"; "N at most 256, D at most
    512"; "D that is not aligned is not supported yet".

    Of the accelerator cards with the 310P: "float16"; "num_key_value_heads: 0 alone"; "sparse_mode: 0 alone";
    "pre_tokens: 2147483647 alone, next_tokens: 0 and 2147483647"; "B at most 128, S at most 65535". And of the same
    cards aclnnPromptFlashAttention: "atten_mask: bool alone"; "where Q_S or KV_S is not a multiple of 128, or the two
    differ, atten_mask cannot be given". torch_npu's host code: "Interface npu_prompt_flash_attention is no longer
    supported on Ascend950".
    """
    require(not is_950(), "npu_prompt_flash_attention is no longer supported on Ascend950")
    require(input_layout in _LAYOUTS, f"input_layout is {input_layout!r}; {', '.join(_LAYOUTS)} are emulated")
    kv_heads = num_key_value_heads or num_heads
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_dtype(name, tensor, (torch.float16,) if is_310p() else HALVES)
        require(tensor.dim() == _LAYOUTS[input_layout], f"{name} has {tensor.dim()} dims in {input_layout}")
    require_same_dtype(query=query, key=key, value=value)
    require_contiguous(query=query, key=key, value=value, atten_mask=atten_mask)
    require(key.shape == value.shape, f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}; one shape")
    require(query.shape[0] == key.shape[0], f"B is {query.shape[0]} and {key.shape[0]}")
    require(num_heads % kv_heads == 0 and num_heads // kv_heads <= 64, f"heads are {num_heads} and {kv_heads}")
    queries = split_sequences(query, input_layout, num_heads)
    keys, values = (split_sequences(tensor, input_layout, kv_heads) for tensor in (key, value))
    heads, rows, width = queries[0].shape
    require(heads == num_heads and heads <= 256, f"N is {heads}, num_heads {num_heads}; at most 256")
    require(keys[0].shape[0] == kv_heads, f"key has {keys[0].shape[0]} heads, num_key_value_heads is {kv_heads}")
    require(width <= 512 and width % 16 == 0, f"D is {width}; a multiple of 16 up to 512")
    require(keys[0].shape[2] == width, f"D of key is {keys[0].shape[2]}, of query {width}")
    columns = keys[0].shape[1]
    if is_310p():
        _check_310p(
            query.shape[0], rows, columns, atten_mask, num_key_value_heads, sparse_mode, pre_tokens, next_tokens
        )
    parts = []
    for place, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        masked = _masked(atten_mask, place, len(queries), rows, columns, sparse_mode, pre_tokens, next_tokens)
        parts.append(attend(q, k, v, masked, scale_value)[0])
    return join_sequences(parts, input_layout, query)


def _check_310p(
    batch: int, rows: int, columns: int, mask: Tensor | None, kv_heads: int, mode: int, before: int, after: int
) -> None:
    require(batch <= 128, f"B is {batch}; at most 128 on 310P")
    require(max(rows, columns) <= 65535, f"S is {max(rows, columns)}; at most 65535 on 310P")
    require(kv_heads == 0, f"num_key_value_heads is {kv_heads}; 0 alone on 310P")
    require(mode == 0, f"sparse_mode is {mode}; 0 alone on 310P")
    require(before == _FAR and after in (0, _FAR), f"tokens are {before}, {after}; {_FAR} and 0 or {_FAR} on 310P")
    if mask is None:
        return
    require(mask.dtype == torch.bool, f"atten_mask is {mask.dtype}; bool alone on 310P")
    whole = rows == columns and rows % 128 == 0
    require(whole, f"atten_mask with Q_S {rows} and KV_S {columns}; equal multiples of 128 on 310P")


def _masked(
    mask: Tensor | None, place: int, batch: int, rows: int, columns: int, mode: int, before: int, after: int
) -> Tensor | None:
    require(0 <= mode <= 4, f"sparse_mode is {mode}; 0 to 4")
    if mode in (2, 3, 4):
        require_compressed(mask, mode)
        return structure(mode, rows, columns, before, after)
    if mask is None:
        require(mode == 0, "sparse_mode 1 needs atten_mask")
        return None
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is {mask.dtype}; bool, int8 or uint8")
    shape = tuple(mask.shape)
    fits = shape[-2:] == (rows, columns) and shape[:-2] in ((), (1,), (batch,), (1, 1), (batch, 1))
    require(fits, f"atten_mask has shape {shape}; Q_S is {rows}, KV_S {columns}, B {batch}")
    full = mask.bool().reshape(-1, rows, columns)
    full = full[place % full.shape[0]]
    if mode == 0:
        i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
        outside = (j - i > after) | (j - i < -before)
        require(bool((full | ~outside).all()), "atten_mask shows pairs outside pre_tokens and next_tokens")
    return full

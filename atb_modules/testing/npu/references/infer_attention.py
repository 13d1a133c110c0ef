"""npu_fused_infer_attention_score_v2: the fused attention of inference, over plain tensors or pages of a cache.

Docs, the formula: "attention_out = softmax(softmax_scale * (query * key) + atten_mask) * value".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atb_modules.testing.npu.references.attention_math import attend, structure
from atb_modules.testing.npu.references.infer_codes import Codes
from atb_modules.testing.npu.references.infer_rules import InferInputs
from atb_modules.testing.npu.references.registry import reference

_FAR = 2147483647


@reference("npu::npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    dequant_scale_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = _FAR,
    next_tokens: int = _FAR,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Docs: "sparse_mode has no effect where Q_S is 1 and there is no rope"; "with atten_mask None in mode 0 the
    tokens are ignored"; "modes 2, 3 and 4 without the mask, or with one of another shape, are an error"; "with pages,
    actual_seq_kvlen is required"; "block ids are not checked"; "inner_precise 2 and 3 correct rows without effect";
    "softmax_lse: the sum's logarithm plus the max, float32, (B, N, S, 1), TND (T, N, 1)"; "key empty: the output is 0".

    Not documented, and made to show here: query rows beyond actual_seq_qlen are NaN, and the LSE of a row that sees
    nothing is plus infinity. A block id out of range reads NaN.

    int8 keys and values come with ``dequant_scale_key`` and ``dequant_scale_value``: see ``infer_codes``.
    """
    codes = Codes(dequant_scale_key, dequant_scale_value, key_quant_mode, value_quant_mode)
    inputs = InferInputs(
        query, key, value, query_rope, key_rope, atten_mask, actual_seq_qlen, actual_seq_kvlen, block_table,
        learnable_sink, num_query_heads, num_key_value_heads or num_query_heads, softmax_scale, pre_tokens,
        next_tokens, input_layout, sparse_mode, block_size, inner_precise, codes,
    )  # fmt: skip
    results = []
    for place, (q, k, v, rows) in enumerate(inputs.sequences()):
        masked = _masked(inputs, place, rows, k.shape[1])
        zero = inner_precise in (2, 3)
        out, top, total = attend(q[:, :rows], k, v, masked, softmax_scale, None, learnable_sink, zero)
        lse = top + torch.log(total)
        seen = _sees(masked, out.shape[0], rows, k.shape[1])
        lse = lse.masked_fill(~seen, float("inf"))
        results.append((_pad(out, q.shape[1]), _pad(lse, q.shape[1])))
    out = _arrange([pair[0] for pair in results], inputs.layout_out, inputs)
    if not return_softmax_lse:
        return out.to(query.dtype), query.new_zeros(0, dtype=torch.float32)
    layout = "TND" if inputs.packed else "BNSD"
    return out.to(query.dtype), _arrange([pair[1] for pair in results], layout, inputs)


def _masked(inputs: InferInputs, place: int, rows: int, columns: int) -> Tensor | None:
    mask = inputs.mask
    if mask is None:
        return None
    mode = inputs.effective_mode
    if mode in (2, 3, 4):
        return structure(mode, rows, columns, inputs.before, inputs.after)
    full = mask.bool()
    if full.dim() == 2:
        full = full[:, None, None] if inputs.longest_q == 1 else full[None, None]
    elif full.dim() == 3:
        full = full[None]
    return full[place % full.shape[0]][..., :rows, :columns]


def _sees(masked: Tensor | None, heads: int, rows: int, columns: int) -> Tensor:
    """Which rows see a key at all (heads, rows, 1)."""
    if columns == 0 or masked is None:
        return torch.full((heads, rows, 1), columns > 0)
    return (~masked).any(-1, keepdim=True).expand(heads, rows, 1)


def _pad(tensor: Tensor, rows: int) -> Tensor:
    """Rows that the operator leaves unwritten."""
    missing = rows - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=float("nan")) if missing else tensor


def _arrange(parts: list[Tensor], layout: str, inputs: InferInputs) -> Tensor:
    """Results (N, S, D) of each sequence in the output's layout."""
    if inputs.packed:
        rows = torch.cat([part.transpose(0, 1) for part in parts]) if parts else torch.empty(0)
        missing = inputs.total_q - rows.shape[0]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, missing), value=float("nan")) if missing else rows
        return (rows.transpose(0, 1) if layout == "NTD" else rows).contiguous()
    joined = torch.stack(parts)
    if layout == "NBSD":
        joined = joined.transpose(0, 1)
    elif layout != "BNSD":
        joined = joined.transpose(1, 2)
    return (joined.flatten(2) if layout == "BSH" else joined).contiguous()

"""Latent attention of a decode step by ATB, over the one cache that holds latent and rotary channels side by side.

npu_fused_infer_attention_score_v2 and npu_multi_head_latent_attention want two contiguous caches, of 512 and of 64
channels; ``_npu_paged_attention_mla`` takes one of 576, whose first channels are the values: a cache as it lies here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from atb_modules.kernels.ascend.derived import derived
from atb_modules.kernels.ascend.rules import HALVES, chip_and_dtype
from atb_modules.kernels.host_values import upload
from atb_modules.kernels.traits import PagedAttentionTraits

#: channels of a cached token: the latent, which is the value, and the rotated key
LATENT, ROPE = 512, 64
#: smaller pages are documented, and reported to give wrong numbers in silence
PAGE_SIZE = 128
_MOST_HEADS = 128


def latent_reasons(traits: PagedAttentionTraits) -> Iterator[str]:
    """What speaks against the operator for a call whose values are the first channels of its keys."""
    operator = "atb::_npu_paged_attention_mla"
    yield from chip_and_dtype(traits, operator, HALVES, on_310p=False)
    if traits.page_dtype != traits.dtype:
        yield f"{operator} takes pages of the queries' dtype {traits.dtype}, these are {traits.page_dtype}"
    if (traits.latent_dim, traits.head_dim) != (LATENT, LATENT + ROPE):
        rope = traits.head_dim - traits.latent_dim
        said = f"the call has {traits.latent_dim} and {rope}"
        yield f"{operator} takes {LATENT} latent and {ROPE} rotary channels, {said}"
    if traits.num_kv_heads != 1:
        yield f"{operator} takes one key head here, the call has {traits.num_kv_heads}"
    if traits.num_heads > _MOST_HEADS or traits.num_heads & (traits.num_heads - 1):
        yield f"{operator} takes 1, 2, 4, ... {_MOST_HEADS} heads, the call has {traits.num_heads}"
    if traits.page_size != PAGE_SIZE:
        yield f"{operator} is right over pages of {PAGE_SIZE} tokens, these have {traits.page_size}"
    if traits.need_lse:
        yield f"{operator} returns no LSE"


def latent_decode(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    queries: list[int],
    lengths: tuple[int, ...],
    scale: float,
) -> Tensor:
    """One token of the rows that have one: q (rows, heads, 576), pages (pages, 1, 128, 576), out (rows, heads, 512).

    The table is made without -1 once a step, and lengths go over as numbers of the host: nothing waits.
    """
    rows = [row for row, count in enumerate(queries) if count]
    context = derived(kv_lengths, ("context", tuple(rows)), lambda: _context(lengths, rows))
    table = derived(block_table, ("latent table", tuple(rows)), lambda: _table(block_table, rows))
    out = q.new_empty(q.shape[0], q.shape[1], LATENT)
    torch.ops.atb._npu_paged_attention_mla(
        q.contiguous(),
        pages.view(pages.shape[0], PAGE_SIZE, 1, LATENT + ROPE),
        1,
        q.shape[1],
        scale,
        table,
        context,
        LATENT,
        out,
    )
    return out


def _context(lengths: tuple[int, ...], rows: list[int]) -> Tensor:
    return torch.tensor([lengths[row] for row in rows], dtype=torch.int32, device="cpu")


def _table(block_table: Tensor, rows: list[int]) -> Tensor:
    """ "The elements must lie in [0, num_blocks)"."""
    if len(rows) < block_table.shape[0]:
        block_table = block_table.index_select(0, upload(torch.tensor(rows), block_table.device))
    return block_table.clamp(min=0)

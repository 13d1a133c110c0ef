"""Attention over whole prompts on the inference chip 310P, by npu_prompt_flash_attention.

It is the fused attention that torch_npu documents for that chip, over tensors as they lie. ATB's
``_npu_flash_attention``, which runs there, too, wants "q_seqlen equal to kv_seqlen" and a float16 mask in a private
format (NZ), and torch_npu documents none of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from atb_modules.kernels.torch.attention import bias_and_visible
from atb_modules.overlays import Overlays
from atb_modules.spec import AttentionSpec

_NPU = torch.ops.npu
#: "B at most 128"
MOST_ROWS = 128
#: what Q_S and KV_S are rounded up to where a mask is given: "not multiples of 128 ... atten_mask cannot be given"
LENGTHS = 128
#: "D that is not aligned is not supported": of float16, 16 fill 32 bytes
CHANNELS = 16
_FAR = 2147483647


def padded_length(q_len: int, kv_len: int) -> int:
    """What queries and keys are both padded to where a mask is given, which wants "Q_S and KV_S of one length"."""
    return -(-max(q_len, kv_len) // LENGTHS) * LENGTHS


def padded_width(head_dim: int, value_dim: int) -> int:
    """What all channels are padded to: "key and value of one shape"."""
    return -(-max(head_dim, value_dim) // CHANNELS) * CHANNELS


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None, overlays: Overlays | None
) -> Tensor:
    """q (batch, heads, q_len, head_dim), k and v (batch, kv_heads, kv_len, ...); out (batch, heads, q_len, value_dim).

    "num_key_value_heads: 0 alone": keys are repeated for the heads that share them. A mask of each head goes in with
    the heads in the place of the batch. Rows that see nothing are averaged by the operator, and cleared afterwards.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_len, value_dim = k.shape[2], v.shape[3]
    bias, visible = bias_and_visible(spec, q, kv_len, mask, None, overlays)
    assert bias is None
    scale, group = spec.scale_for(head_dim), heads // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    hidden, length = None, 0
    if visible is not None:
        visible = visible[(None,) * (4 - visible.dim())]
        length = padded_length(q_len, kv_len)
        hidden = pad(
            ~visible.expand(*visible.shape[:2], q_len, kv_len), (0, length - kv_len, 0, length - q_len), value=True
        )
        if hidden.shape[1] > 1:
            hidden = hidden.expand(batch, heads, length, length).reshape(-1, 1, length, length)
            q, k, v = (t.reshape(batch * heads, 1, *t.shape[2:]) for t in (q, k, v))
    width = padded_width(head_dim, value_dim)
    q, k, v = (_padded(t, length, width) for t in (q, k, v))
    outs = []
    for first in range(0, q.shape[0], MOST_ROWS):
        rows = slice(first, first + MOST_ROWS)
        own = None
        if hidden is not None:
            own = (hidden if hidden.shape[0] == 1 else hidden[rows]).contiguous()
        outs.append(
            _NPU.npu_prompt_flash_attention(
                q[rows],
                k[rows],
                v[rows],
                atten_mask=own,
                num_heads=q.shape[1],
                scale_value=scale,
                pre_tokens=_FAR,
                next_tokens=_FAR,
                input_layout="BNSD",
            )
        )
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    out = out.view(batch, heads, *out.shape[2:])[:, :, :q_len, :value_dim]
    if visible is None:
        return out
    return out.masked_fill(~visible.any(-1, keepdim=True), 0.0)


def _padded(tensor: Tensor, length: int, width: int) -> Tensor:
    """Zeros behind the tokens (where ``length`` says so) and the channels; contiguous."""
    tokens, channels = tensor.shape[2:]
    more = (0, width - channels, 0, max(0, length - tokens))
    return pad(tensor, more).contiguous() if any(more) else tensor.contiguous()

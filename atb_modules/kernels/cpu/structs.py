"""The argument structs of the C interface (csrc/atb_cpu.h), for ctypes; keep both in the same order."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}
MASK_BOOL = 3
#: the dtype of pages of keys and values that are codes with scales
INT8_PAGES = 3

_P, _I64, _I32, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(*groups: tuple[str, Any]) -> list[Any]:
    return [(name, kind) for names, kind in groups for name in names.split()]


class NormArgs(ctypes.Structure):
    _fields_ = _fields(
        ("x residual weight bias out sum", _P),
        ("rows width x_stride residual_stride", _I64),
        ("eps weight_offset", _F),
        ("dtype weight_dtype cast_first layer_norm threads", _I32),
        ("keep scale shift", _P),
        ("scale_stride shift_stride group", _I64),
        ("keep_scale", _F),
    )


class GatedArgs(ctypes.Structure):
    _fields_ = _fields(
        ("gate up out", _P), ("rows width gate_stride up_stride out_stride", _I64), ("dtype kind threads", _I32)
    )


class GatedBackwardArgs(ctypes.Structure):
    _fields_ = _fields(
        ("grad gate up factors d_gate d_up out d_factors", _P),
        ("rows width grad_stride gate_stride up_stride d_gate_stride d_up_stride out_stride", _I64),
        ("dtype kind threads", _I32),
    )


class RotaryArgs(ctypes.Structure):
    _fields_ = _fields(
        ("x out cos sin", _P),
        ("tokens heads head_dim half x_token x_head out_token out_head", _I64),
        ("dtype interleaved threads", _I32),
    )


class AppendArgs(ctypes.Structure):
    _fields_ = _fields(
        ("q k v cos sin k_pages v_pages k_scales v_scales slots", _P),
        ("tokens heads kv_heads head_dim half page_size", _I64),
        ("q_token q_head k_token k_head v_token v_head", _I64),
        ("dtype page_dtype interleaved threads", _I32),
    )


class LinearArgs(ctypes.Structure):
    _fields_ = _fields(
        ("x weight bias out", _P),
        ("rows n k x_stride weight_stride out_stride", _I64),
        ("dtype weight_dtype bias_dtype threads", _I32),
    )


class AttentionArgs(ctypes.Structure):
    _fields_ = _fields(
        ("q k v mask sinks slopes reach blocks starts out lse", _P),
        ("batch heads kv_heads q_len kv_len head_dim", _I64),
        ("q_strides k_strides v_strides", _I64 * 3),
        ("mask_strides", _I64 * 4),
        ("num_starts reach_stride", _I64),
        ("block_strides", _I64 * 2),
        ("block_size", _I64),
        ("left right", _I64),
        ("scale softcap", _F),
        ("dtype mask_dtype causal threads", _I32),
    )


class AttentionBackwardArgs(ctypes.Structure):
    _fields_ = [("forward", AttentionArgs), *_fields(("d_out d_lse d_q d_k d_v", _P), ("splits", _I64))]


class MergeArgs(ctypes.Structure):
    _fields_ = _fields(("out lse other other_lse", _P), ("batch heads q_len head_dim", _I64), ("dtype threads", _I32))


class PagedArgs(ctypes.Structure):
    _fields_ = _fields(
        ("q k_pages v_pages k_scales v_scales block_table kv_lengths cu_seqlens_q sinks slopes out lse", _P),
        ("batch heads kv_heads head_dim page_size max_blocks total q_token q_head", _I64),
        ("left right", _I64),
        ("scale softcap", _F),
        ("dtype page_dtype causal threads", _I32),
    )


class DecodeArgs(ctypes.Structure):
    _fields_ = _fields(
        ("qkv_weight o_weight gate_up_weight down_weight", _P),
        ("qkv_bias o_bias gate_up_bias down_bias", _P),
        ("attn_norm attn_post_norm mlp_norm mlp_post_norm", _P),
        ("q_norm k_norm sinks k_pages v_pages", _P),
        ("hidden cos sin slots block_table kv_lengths workspace", _P),
        ("batch hidden_size intermediate_size heads kv_heads head_dim half page_size max_blocks", _I64),
        ("left", _I64),
        ("eps weight_offset scale softcap", _F),
        ("weight_dtype page_dtype interleaved activation threads reserved", _I32),
    )


class DecodeStackArgs(ctypes.Structure):
    _fields_ = _fields(
        ("layers rotary_of group_of hidden cos sin slots block_tables max_blocks kv_lengths", _P),
        ("count batch", _I64),
        ("threads reserved", _I32),
    )


KERNELS: dict[str, type[ctypes.Structure]] = {
    "atb_norm": NormArgs,
    "atb_gated_activation": GatedArgs,
    "atb_gated_backward": GatedBackwardArgs,
    "atb_rotary": RotaryArgs,
    "atb_append": AppendArgs,
    "atb_linear": LinearArgs,
    "atb_attention": AttentionArgs,
    "atb_attention_backward": AttentionBackwardArgs,
    "atb_merge_attention": MergeArgs,
    "atb_paged_attention": PagedArgs,
    "atb_decode_layer": DecodeArgs,
    "atb_decode_stack": DecodeStackArgs,
    "atb_decode_workspace": DecodeArgs,
}

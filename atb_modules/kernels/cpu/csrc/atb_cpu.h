/* The C interface of the CPU kernels: pointers, sizes, strides (in elements) and thread counts, no framework.
 *
 * Every kernel takes one struct. dtypes: 0 float32, 1 bfloat16, 2 float16; pages of keys and values also 3,
 * int8 with a scale for each page and head. Arithmetic is float32 throughout. Null pointers mean "absent"
 * where a member is marked optional. The caller has checked shapes and dtypes.
 */
#ifndef ATB_CPU_H
#define ATB_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ATB_ABI_VERSION 6

enum { ATB_F32 = 0, ATB_BF16 = 1, ATB_F16 = 2, ATB_I8 = 3 };
enum { ATB_SILU = 0, ATB_GELU = 1, ATB_GELU_TANH = 2, ATB_RELU2 = 3 };
enum { ATB_BASELINE = 0, ATB_AVX2 = 1, ATB_AVX512 = 2 };

/* RMSNorm or LayerNorm of (rows, width), alone or after `sum = x + residual` rounded to the dtype. With
   `keep` the sum is `keep_scale * keep * x + residual`; with `scale` and `shift` the result is `norm * (1 +
   scale) + shift`, where `group` rows one after the other share a row of both. */
typedef struct {
  const void *x, *residual;  /* residual optional */
  const void *weight, *bias; /* optional */
  void *out, *sum;           /* contiguous; sum only with residual */
  int64_t rows, width, x_stride, residual_stride;
  float eps, weight_offset;
  int32_t dtype, weight_dtype, cast_first, layer_norm, threads;
  const uint8_t *keep;       /* optional, only with residual: (rows, width) contiguous, 0 or 1 */
  const void *scale, *shift; /* optional, in the dtype */
  int64_t scale_stride, shift_stride, group;
  float keep_scale;
} atb_norm_args;

/* out = activation(gate) * up, rows with their own strides; out may be gate. */
typedef struct {
  const void *gate, *up;
  void *out;
  int64_t rows, width, gate_stride, up_stride, out_stride;
  int32_t dtype, kind, threads;
} atb_gated_args;

/* Gradients of factor * activation(gate) * up for `grad` (all in the dtype, rows with their own strides):
   d_gate and d_up. Without up it is factor * activation(gate). On request also out = activation(gate) * up,
   and for each row the gradient of its factor, the sum of grad * activation(gate) * up. */
typedef struct {
  const void *grad, *gate, *up; /* up optional */
  const float *factors;         /* optional, one a row */
  void *d_gate, *d_up;          /* d_up only with up */
  void *out;                    /* optional */
  float *d_factors;             /* optional */
  int64_t rows, width, grad_stride, gate_stride, up_stride, d_gate_stride, d_up_stride, out_stride;
  int32_t dtype, kind, threads;
} atb_gated_backward_args;

/* Rotates the first 2 * half channels of x (tokens, heads, head_dim); may write in place. */
typedef struct {
  const void *x;
  void *out;
  const float *cos, *sin; /* (tokens, half), contiguous */
  int64_t tokens, heads, head_dim, half;
  int64_t x_token, x_head, out_token, out_head;
  int32_t dtype, interleaved, threads;
} atb_rotary_args;

/* Rotates q in place (optional), writes rotated k and v into pages by slot; cos null = no rotation.

   A value of an int8 page is its code times the scale of its page and head. Tokens of one page lie side by
   side, in rising slots, and the first slot begins the page anew. Where the tokens of a call need a larger
   scale than the page has, the codes that are there are rounded to it once more. */
typedef struct {
  void *q; /* optional */
  const void *k, *v;
  const float *cos, *sin;
  void *k_pages, *v_pages;    /* (num_pages, kv_heads, page_size, head_dim) */
  float *k_scales, *v_scales; /* int8 pages: (num_pages, kv_heads) */
  const int64_t *slots;       /* -1 = do not write */
  int64_t tokens, heads, kv_heads, head_dim, half, page_size;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int32_t dtype, page_dtype, interleaved, threads;
} atb_append_args;

/* out (rows, n) = x (rows, k) @ weight (n, k)^T + bias; each weight row is read once for up to 16 rows. */
typedef struct {
  const void *x, *weight, *bias; /* bias optional */
  void *out;
  int64_t rows, n, k, x_stride, weight_stride, out_stride;
  int32_t dtype, weight_dtype, bias_dtype, threads;
} atb_linear_args;

/* Dense attention, (batch, heads, seq, head_dim) by strides, last stride 1; out (batch, seq, heads, head_dim)
   contiguous, as the projection behind it reads it; lse (batch, heads, seq). */
typedef struct {
  const void *q, *k, *v;
  const void *mask;            /* optional, by four strides, 0 = broadcast; bool (mask_dtype 3) or added */
  const float *sinks, *slopes; /* optional, (heads,) */
  const int32_t *reach;        /* optional, (batch, q_len, 5): see below; instead of causal, left, right */
  const uint8_t *blocks; /* optional, (batch, heads, q_blocks, kv_blocks): live blocks of block_size^2 */
  const int64_t *starts; /* optional, (num_starts,): see below */
  void *out;
  float *lse;
  int64_t batch, heads, kv_heads, q_len, kv_len, head_dim;
  int64_t q_strides[3], k_strides[3], v_strides[3], mask_strides[4];
  int64_t num_starts, reach_stride, block_strides[2],
      block_size;      /* of a batch row; of a batch row and a head; 0 = shared */
  int64_t left, right; /* -1 = unbounded */
  float scale, softcap;
  int32_t dtype, mask_dtype, causal, threads;
} atb_attention_args;

/* A row of `reach` is (far_low, far_high, low, high, position): the query sees the keys [far_low, far_high)
   and [low, high), the first of them before the second or empty, and stands at `position` among the keys
   (ALiBi).

   The queries of one kv head, times the heads that share it, are worked on 64 at a time from the first on;
   `starts` cuts them elsewhere, so that no block lies across two segments: 0, rising by 1 to 64, up to
   q_len * heads / kv_heads. */

/* Gradients of dense attention. `forward` holds what the forward call had, `out` and `lse` its results. */
typedef struct {
  atb_attention_args forward;
  const void *d_out;  /* like out: (batch, q_len, heads, head_dim) contiguous, in the dtype */
  const float *d_lse; /* optional, (batch, heads, q_len) */
  float *d_q;         /* (batch, heads, q_len, head_dim) */
  float *d_k,
      *d_v; /* (splits, batch, kv_heads, kv_len, head_dim), zeros; their sum over splits is the gradient */
  int64_t splits;
} atb_attention_backward_args;

/* Joins `other` into `out`, both results of dense attention over disjoint keys, laid out as it leaves them:
   out becomes that of one softmax over the keys of both, and lse its log-sum-exp. */
typedef struct {
  void *out;         /* (batch, q_len, heads, head_dim) contiguous, in the dtype */
  float *lse;        /* (batch, heads, q_len) contiguous */
  const void *other; /* like out */
  const float *other_lse;
  int64_t batch, heads, q_len, head_dim;
  int32_t dtype, threads;
} atb_merge_args;

/* Attention of packed queries over pages; out (total, heads, head_dim), lse (heads, total). */
typedef struct {
  const void *q, *k_pages, *v_pages;
  const float *k_scales, *v_scales; /* int8 pages: (num_pages, kv_heads) */
  const int32_t *block_table, *kv_lengths, *cu_seqlens_q;
  const float *sinks, *slopes; /* optional */
  void *out;
  float *lse; /* optional */
  int64_t batch, heads, kv_heads, head_dim, page_size, max_blocks, total, q_token, q_head;
  int64_t left, right;
  float scale, softcap;
  int32_t dtype, page_dtype, causal, threads;
} atb_paged_args;

/* One decoder layer for `batch` rows of one token each; hidden is float32 and updated in place. */
typedef struct {
  const void *qkv_weight, *o_weight, *gate_up_weight, *down_weight;   /* (out, in), contiguous */
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;          /* optional */
  const float *attn_norm, *attn_post_norm, *mlp_norm, *mlp_post_norm; /* post norms optional */
  const float *q_norm, *k_norm;                                       /* optional, (head_dim,) */
  const float *sinks;                                                 /* optional, (heads,) */
  void *k_pages, *v_pages;
  float *hidden;          /* (batch, hidden_size) */
  const float *cos, *sin; /* (batch, half) */
  const int64_t *slots;
  const int32_t *block_table, *kv_lengths;
  float *workspace; /* atb_decode_workspace(args) floats */
  int64_t batch, hidden_size, intermediate_size, heads, kv_heads, head_dim, half, page_size, max_blocks;
  int64_t left; /* -1 = unbounded */
  float eps, weight_offset, scale, softcap;
  int32_t weight_dtype, page_dtype, interleaved, activation, threads, reserved;
} atb_decode_args;

/* A step through `count` layers one after the other: what stays from step to step is set in `layers`, what
   the layers share is here. rotary_of and group_of say which tables a layer takes. */
typedef struct {
  const atb_decode_args *layers;
  const int32_t *rotary_of, *group_of;
  float *hidden;
  const float *const *cos, *const *sin;
  const int64_t *const *slots;
  const int32_t *const *block_tables;
  const int64_t *max_blocks;
  const int32_t *kv_lengths;
  int64_t count, batch;
  int32_t threads, reserved;
} atb_decode_stack_args;

#if defined(__GNUC__)
#define ATB_EXPORT __attribute__((visibility("default")))
#else
#define ATB_EXPORT
#endif

ATB_EXPORT int32_t atb_abi_version(void);
/* The best instruction set of this processor that the library was built for. */
ATB_EXPORT int32_t atb_best_isa(void);
ATB_EXPORT int32_t atb_current_isa(void);
/* Chooses an instruction set for all later calls; returns 0, or -1 if it cannot run here. */
ATB_EXPORT int32_t atb_select_isa(int32_t isa);
/* Whether the processor multiplies bfloat16 natively (AVX-512 BF16 or AMX). */
ATB_EXPORT int32_t atb_has_bf16_units(void);

ATB_EXPORT void atb_norm(const atb_norm_args *args);
ATB_EXPORT void atb_gated_activation(const atb_gated_args *args);
ATB_EXPORT void atb_gated_backward(const atb_gated_backward_args *args);
ATB_EXPORT void atb_rotary(const atb_rotary_args *args);
ATB_EXPORT void atb_append(const atb_append_args *args);
ATB_EXPORT void atb_linear(const atb_linear_args *args);
ATB_EXPORT void atb_attention(const atb_attention_args *args);
ATB_EXPORT void atb_attention_backward(const atb_attention_backward_args *args);
ATB_EXPORT void atb_merge_attention(const atb_merge_args *args);
ATB_EXPORT void atb_paged_attention(const atb_paged_args *args);
ATB_EXPORT void atb_decode_layer(const atb_decode_args *args);
ATB_EXPORT void atb_decode_stack(const atb_decode_stack_args *args);
ATB_EXPORT int64_t atb_decode_workspace(const atb_decode_args *args);

#ifdef __cplusplus
}
#endif
#endif

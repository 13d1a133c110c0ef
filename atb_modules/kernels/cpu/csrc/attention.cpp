// Dense attention: blocks of queries of one kv head group, handed to threads as they come free.
#include "dense_block.h"
#include "table.h"
#include "threads.h"
#include <stdlib.h>

namespace ATB_ISA {

// The keys that query i may see by the structure of the call: a row of `reach`, or causal alignment and
// window.
static void visible_range(const atb_attention_args *a, Block &block, int lane, int64_t b, int64_t i) {
  if (a->reach) {
    const int32_t *row = a->reach + b * a->reach_stride + i * 5;
    const int32_t last = (int32_t)a->kv_len; // whatever the rows say, only keys that are there are read
    block.far_low[lane] = row[0] > 0 ? row[0] : 0;
    block.far_high[lane] = row[1] < last ? row[1] : last;
    block.low[lane] = row[2] > 0 ? row[2] : 0;
    block.high[lane] = row[3] < last ? row[3] : last;
    block.position[lane] = row[4];
    block.has_far |= block.far_high[lane] > block.far_low[lane];
    return;
  }
  const int64_t at = i + (a->causal == 2 ? 0 : a->kv_len - a->q_len);
  const int64_t first = a->left < 0 ? 0 : max64(0, at - a->left);
  int64_t last = a->right < 0 ? a->kv_len : min64(a->kv_len, at + a->right + 1);
  if (a->causal) last = min64(last, at + 1);
  block.far_low[lane] = block.far_high[lane] = 0;
  block.position[lane] = (int32_t)at;
  block.low[lane] = (int32_t)min64(first, a->kv_len);
  block.high[lane] = (int32_t)max64(last, 0);
}

void fill_dense(const atb_attention_args *a, Block &block, int64_t b, int64_t kv_head, int64_t index) {
  const int64_t first = dense_first(a, index), all = a->heads / a->kv_heads * a->q_len;
  block.count = (int)(a->starts ? a->starts[index + 1] - first : min64(LANES, all - first));
  block.has_slopes = a->slopes;
  block.has_sinks = a->sinks;
  block.block_size = a->blocks ? a->block_size : 0;
  block.mask_dtype = a->mask ? a->mask_dtype : -1;
  block.mask_key_stride = a->mask_strides[3];
  block.mask_shared = a->mask && a->mask_strides[1] == 0 && a->mask_strides[2] == 0;
  block.dtype = a->dtype;
  const int64_t mask_size = element_size(a->mask_dtype), size = element_size(a->dtype);
  for (int lane = 0; lane < block.count; ++lane) {
    const auto [i, head] = dense_lane(a, kv_head, first, lane);
    visible_range(a, block, lane, b, i);
    block.slope[lane] = a->slopes ? a->slopes[head] : 0.0f;
    block.sink[lane] = a->sinks ? a->sinks[head] : 0.0f;
    if (a->mask)
      block.mask[lane] =
          (const char *)a->mask +
          mask_size * (b * a->mask_strides[0] + head * a->mask_strides[1] + i * a->mask_strides[2]);
    if (a->blocks) {
      const int64_t across = (a->kv_len + a->block_size - 1) / a->block_size;
      block.live[lane] =
          a->blocks + b * a->block_strides[0] + head * a->block_strides[1] + i / a->block_size * across;
    }
    const int64_t row = (b * a->heads + head) * a->q_len + i;
    block.out[lane] = (char *)a->out + ((b * a->q_len + i) * a->heads + head) * a->head_dim * size;
    block.lse[lane] = a->lse + row;
  }
}

KeyRows dense_keys(const atb_attention_args *a, int64_t b, int64_t kv_head) {
  const int64_t size = element_size(a->dtype);
  return {(const char *)a->k + (b * a->k_strides[0] + kv_head * a->k_strides[1]) * size,
          (const char *)a->v + (b * a->v_strides[0] + kv_head * a->v_strides[1]) * size,
          a->k_strides[2] * size,
          a->v_strides[2] * size,
          a->dtype,
          nullptr,
          0,
          0};
}

void attention(const atb_attention_args *a) {
  const int64_t blocks = dense_blocks(a), units = a->batch * a->kv_heads, items = units * blocks;
  const int64_t size = Scratch::size(a->head_dim);
  const int threads = (int)max64(1, min64(a->threads, items));
  float *scratch = (float *)malloc(size * threads * sizeof(float));
  take_items(threads, items, [&](int64_t item, int thread) {
    // The last blocks see the most keys of a causal call: they start first, so that no thread ends on a long
    // one.
    const int64_t index = blocks - 1 - item / units, first = dense_first(a, index);
    const int64_t b = item % units / a->kv_heads, kv_head = item % units % a->kv_heads;
    Scratch s(scratch + thread * size, a->head_dim);
    Block block;
    fill_dense(a, block, b, kv_head, index);
    for (int lane = 0; lane < block.count; ++lane)
      set_query(s, lane, dense_query(a, b, dense_lane(a, kv_head, first, lane)), a->dtype, a->head_dim,
                a->scale);
    flash_block(block, s, a->head_dim, a->softcap, dense_keys(a, b, kv_head));
  });
  free(scratch);
}

} // namespace ATB_ISA

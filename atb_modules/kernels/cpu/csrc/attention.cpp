// Dense attention: blocks of queries of one kv head group, handed to threads as they come free.
#include "flash_block.h"
#include "table.h"
#include "threads.h"
#include <stdlib.h>

namespace ATB_ISA {

// The keys that query i may see by the structure of the call: causal alignment and window.
ATB_INLINE void visible_range(const atb_attention_args *a, int64_t i, int32_t *low, int32_t *high,
                              int32_t *position) {
  const int64_t at = i + (a->causal == 2 ? 0 : a->kv_len - a->q_len);
  int64_t first = a->left < 0 ? 0 : max64(0, at - a->left);
  int64_t last = a->right < 0 ? a->kv_len : min64(a->kv_len, at + a->right + 1);
  if (a->causal) last = min64(last, at + 1);
  *position = (int32_t)at;
  *low = (int32_t)min64(first, a->kv_len);
  *high = (int32_t)max64(last, 0);
}

static void fill(const atb_attention_args *a, Block &block, Scratch &s, int64_t b, int64_t kv_head,
                 int64_t first) {
  const int64_t group = a->heads / a->kv_heads;
  block.count = (int)min64(LANES, group * a->q_len - first);
  block.has_slopes = a->slopes;
  block.has_sinks = a->sinks;
  block.mask_dtype = a->mask ? a->mask_dtype : -1;
  block.mask_key_stride = a->mask_strides[3];
  block.mask_shared = a->mask && a->mask_strides[1] == 0 && a->mask_strides[2] == 0;
  block.dtype = a->dtype;
  const int64_t mask_size = element_size(a->mask_dtype), size = element_size(a->dtype);
  for (int lane = 0; lane < block.count; ++lane) {
    const int64_t i = (first + lane) / group, head = kv_head * group + (first + lane) % group;
    visible_range(a, i, block.low + lane, block.high + lane, block.position + lane);
    block.slope[lane] = a->slopes ? a->slopes[head] : 0.0f;
    block.sink[lane] = a->sinks ? a->sinks[head] : 0.0f;
    block.mask[lane] =
        (const char *)a->mask +
        (a->mask ? mask_size * (b * a->mask_strides[0] + head * a->mask_strides[1] + i * a->mask_strides[2])
                 : 0);
    const int64_t row = (b * a->heads + head) * a->q_len + i;
    block.out[lane] = (char *)a->out + ((b * a->q_len + i) * a->heads + head) * a->head_dim * size;
    block.lse[lane] = a->lse + row;
    const int64_t at = b * a->q_strides[0] + head * a->q_strides[1] + i * a->q_strides[2];
    set_query(s, lane, (const char *)a->q + at * size, a->dtype, a->head_dim, a->scale);
  }
}

void attention(const atb_attention_args *a) {
  const int64_t group = a->heads / a->kv_heads, blocks = (group * a->q_len + LANES - 1) / LANES;
  const int64_t items = a->batch * a->kv_heads * blocks, size = Scratch::size(a->head_dim),
                element = element_size(a->dtype);
  const int threads = (int)max64(1, min64(a->threads, items));
  float *scratch = (float *)malloc(size * threads * sizeof(float));
  take_items(threads, items, [&](int64_t item, int thread) {
    // The last blocks see the most keys of a causal call: they start first, so that no thread ends on a long
    // one.
    const int64_t unit = item % (a->batch * a->kv_heads),
                  block_index = blocks - 1 - item / (a->batch * a->kv_heads);
    const int64_t b = unit / a->kv_heads, kv_head = unit % a->kv_heads;
    Scratch s(scratch + thread * size, a->head_dim);
    Block block;
    fill(a, block, s, b, kv_head, block_index * LANES);
    const KeyRows keys = {(const char *)a->k + (b * a->k_strides[0] + kv_head * a->k_strides[1]) * element,
                          (const char *)a->v + (b * a->v_strides[0] + kv_head * a->v_strides[1]) * element,
                          a->k_strides[2] * element,
                          a->v_strides[2] * element,
                          a->dtype,
                          nullptr,
                          0,
                          0};
    flash_block(block, s, a->head_dim, a->softcap, keys);
  });
  free(scratch);
}

} // namespace ATB_ISA

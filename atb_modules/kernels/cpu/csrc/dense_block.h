// Blocks of queries of the dense call, shared by its forward and its backward.
#pragma once
#include "flash_block.h"

namespace ATB_ISA {

// Number of blocks of one (batch row, kv head).
ATB_INLINE int64_t dense_blocks(const atb_attention_args *a) {
  return a->starts ? a->num_starts - 1 : (a->heads / a->kv_heads * a->q_len + LANES - 1) / LANES;
}

// The first lane of a block among those of its kv head.
ATB_INLINE int64_t dense_first(const atb_attention_args *a, int64_t block) {
  return a->starts ? a->starts[block] : block * LANES;
}

// The query and the head of a lane.
struct Lane {
  int64_t i, head;
};
ATB_INLINE Lane dense_lane(const atb_attention_args *a, int64_t kv_head, int64_t first, int lane) {
  const int64_t group = a->heads / a->kv_heads;
  return {(first + lane) / group, kv_head * group + (first + lane) % group};
}

ATB_INLINE const char *dense_query(const atb_attention_args *a, int64_t b, const Lane &lane) {
  const int64_t at = b * a->q_strides[0] + lane.head * a->q_strides[1] + lane.i * a->q_strides[2];
  return (const char *)a->q + at * element_size(a->dtype);
}

// Everything of the index-th block but its queries.
void fill_dense(const atb_attention_args *a, Block &block, int64_t b, int64_t kv_head, int64_t index);

KeyRows dense_keys(const atb_attention_args *a, int64_t b, int64_t kv_head);

} // namespace ATB_ISA

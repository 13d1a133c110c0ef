// Attention over pages: one token a row by the decode kernel, longer rows by the flash kernel.
#include "flash_block.h"
#include "paged_group.h"
#include "table.h"
#include <stdlib.h>

namespace ATB_ISA {

static void decode_rows(const atb_paged_args *a) {
  const PagedKeys keys = {a->k_pages,  a->v_pages,  a->block_table, a->kv_lengths, a->batch, a->heads,
                          a->kv_heads, a->head_dim, a->page_size,   a->max_blocks, a->left,  a->softcap,
                          a->slopes,   a->sinks,    a->k_scales,    a->v_scales};
  const int64_t group = keys.group(), stride = vector_padded(a->head_dim), units = a->batch * a->kv_heads;
  const int64_t work = total_keys(keys) * a->head_dim;
  const int threads = work < 16384 ? 1 : a->threads;
  const int64_t own = group * stride + group * a->head_dim, size = element_size(a->dtype);
  float *memory = (float *)malloc(((units + threads) * keys.partial_size() + threads * own) * sizeof(float));
  float *partials = memory, *private_memory = memory + (units + threads) * keys.partial_size();
  Barrier barrier;
  on_threads(threads, [&](int thread, int count) {
    float *q = private_memory + thread * own, *result = q + group * stride;
    attend_share(keys, a->page_dtype, thread, count, partials, [&](int64_t b, int64_t h, bool) {
      memset(q, 0, group * stride * sizeof(float));
      const bool has_query = a->cu_seqlens_q[b + 1] > a->cu_seqlens_q[b];
      for (int64_t g = 0; g < group && has_query; ++g) {
        const int64_t at = a->cu_seqlens_q[b] * a->q_token + (h * group + g) * a->q_head;
        read_floats((const char *)a->q + at * size, a->dtype, a->head_dim, q + g * stride);
        for (int64_t d = 0; d < a->head_dim; ++d) q[g * stride + d] *= a->scale;
      }
      return (const float *)q;
    });
    barrier.wait(count);
    const Range mine = share(units, thread, count);
    float lse[group];
    for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
      const int64_t b = unit / a->kv_heads, h = unit % a->kv_heads, token = a->cu_seqlens_q[b];
      if (a->cu_seqlens_q[b + 1] == token) continue;
      combine(keys, count, partials, b, h, result, lse);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t head = h * group + g;
        write_floats(result + g * a->head_dim, a->head_dim,
                     (char *)a->out + (token * a->heads + head) * a->head_dim * size, a->dtype);
        if (a->lse) a->lse[head * a->total + token] = lse[g];
      }
    }
  });
  free(memory);
}

struct Place {
  int64_t b, kv_head, first;
};

// The item-th block of queries over all rows; blocks of a row lie together, its kv heads outermost.
static Place find_block(const atb_paged_args *a, int64_t item) {
  const int64_t group = a->heads / a->kv_heads;
  for (int64_t b = 0; b < a->batch; ++b) {
    const int64_t q_len = a->cu_seqlens_q[b + 1] - a->cu_seqlens_q[b];
    const int64_t blocks = (q_len * group + LANES - 1) / LANES, here = blocks * a->kv_heads;
    if (item < here) return {b, item % a->kv_heads, (blocks - 1 - item / a->kv_heads) * LANES};
    item -= here;
  }
  return {a->batch, 0, 0};
}

static void fill(const atb_paged_args *a, Block &block, Scratch &s, const Place &place, int64_t q_len) {
  const int64_t group = a->heads / a->kv_heads, length = a->kv_lengths[place.b];
  block.count = (int)min64(LANES, group * q_len - place.first);
  block.has_slopes = a->slopes;
  block.has_sinks = a->sinks;
  block.dtype = a->dtype;
  const int64_t size = element_size(a->dtype);
  for (int lane = 0; lane < block.count; ++lane) {
    const int64_t i = (place.first + lane) / group,
                  head = place.kv_head * group + (place.first + lane) % group;
    const int64_t token = a->cu_seqlens_q[place.b] + i, at = length - q_len + i;
    const int64_t last = a->right < 0 ? length : min64(length, at + a->right + 1);
    block.position[lane] = (int32_t)at;
    block.low[lane] = (int32_t)(a->left < 0 ? 0 : max64(0, at - a->left));
    block.high[lane] = (int32_t)max64(0, a->causal ? min64(last, at + 1) : last);
    block.slope[lane] = a->slopes ? a->slopes[head] : 0.0f;
    block.sink[lane] = a->sinks ? a->sinks[head] : 0.0f;
    block.out[lane] = (char *)a->out + (token * a->heads + head) * a->head_dim * size;
    block.lse[lane] = a->lse ? a->lse + head * a->total + token : nullptr;
    set_query(s, lane, (const char *)a->q + (token * a->q_token + head * a->q_head) * size, a->dtype,
              a->head_dim, a->scale);
  }
}

static void prefill_rows(const atb_paged_args *a) {
  const int64_t group = a->heads / a->kv_heads, size = Scratch::size(a->head_dim);
  int64_t items = 0;
  for (int64_t b = 0; b < a->batch; ++b)
    items += ((a->cu_seqlens_q[b + 1] - a->cu_seqlens_q[b]) * group + LANES - 1) / LANES * a->kv_heads;
  const int threads = (int)max64(1, min64(a->threads, items));
  float *scratch = (float *)malloc(size * threads * sizeof(float));
  take_items(threads, items, [&](int64_t item, int thread) {
    const Place place = find_block(a, item);
    const int64_t q_len = a->cu_seqlens_q[place.b + 1] - a->cu_seqlens_q[place.b];
    Scratch s(scratch + thread * size, a->head_dim);
    Block block;
    fill(a, block, s, place, q_len);
    const int64_t row = a->head_dim * element_size(a->page_dtype), head = place.kv_head * a->page_size * row;
    const KeyRows keys = {(const char *)a->k_pages + head,
                          (const char *)a->v_pages + head,
                          row,
                          row,
                          a->page_dtype,
                          a->block_table + place.b * a->max_blocks,
                          a->page_size,
                          a->kv_heads * a->page_size * row,
                          a->k_scales ? a->k_scales + place.kv_head : nullptr,
                          a->v_scales ? a->v_scales + place.kv_head : nullptr,
                          a->kv_heads};
    flash_block(block, s, a->head_dim, a->softcap, keys);
  });
  free(scratch);
}

void paged(const atb_paged_args *a) {
  bool single = true; // with one query nothing lies to its right, so neither causality nor `right` matters
  for (int64_t b = 0; b < a->batch && single; ++b) single = a->cu_seqlens_q[b + 1] - a->cu_seqlens_q[b] <= 1;
  if (single)
    decode_rows(a);
  else
    prefill_rows(a);
}

} // namespace ATB_ISA

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

// Keys below which a part is not worth its merge.
constexpr int64_t PART_KEYS = 256;

// Into how many parts the keys of a block are cut, so that few blocks (short queries) fill all threads.
static int64_t key_parts(const atb_attention_args *a, int64_t items) {
  if (a->threads < 2 || items % a->threads == 0 || items >= 4 * a->threads) return 1;
  return max64(1, min64(a->threads, a->kv_len / PART_KEYS));
}

// Leaves the block its part of the keys that any of its lanes sees; the sink counts in the first part alone.
static void take_part(Block &block, int64_t part, int64_t parts) {
  int64_t begin = INT32_MAX, end = 0;
  for (int lane = 0; lane < block.count; ++lane) {
    if (block.low[lane] < block.high[lane])
      begin = min64(begin, block.low[lane]), end = max64(end, block.high[lane]);
    if (block.far_low[lane] < block.far_high[lane])
      begin = min64(begin, block.far_low[lane]), end = max64(end, block.far_high[lane]);
  }
  const int64_t n = max64(0, end - begin);
  const int32_t first = (int32_t)(begin + n * part / parts), last = (int32_t)(begin + n * (part + 1) / parts);
  const auto clamp = [&](int32_t at) { return at < first ? first : at > last ? last : at; };
  for (int lane = 0; lane < block.count; ++lane) {
    block.low[lane] = clamp(block.low[lane]), block.high[lane] = clamp(block.high[lane]);
    block.far_low[lane] = clamp(block.far_low[lane]), block.far_high[lane] = clamp(block.far_high[lane]);
  }
  block.has_sinks = block.has_sinks && part == 0;
}

// Joins the parts of one row by their LSE: the row's output and LSE.
static void merge_parts(const float *out, const float *lse, int64_t parts, int64_t step, int64_t head_dim,
                        int dtype, void *to, float *to_lse) {
  float top = -INF, total = 0.0f, weight[parts], merged[head_dim];
  for (int64_t p = 0; p < parts; ++p) top = lse[p * step] > top ? lse[p * step] : top;
  const float shift = top == -INF ? 0.0f : top;
  for (int64_t p = 0; p < parts; ++p) total += weight[p] = exp(set1(lse[p * step] - shift))[0];
  for (int64_t d = 0; d < head_dim; ++d) {
    float sum = 0.0f;
    for (int64_t p = 0; p < parts; ++p) sum += weight[p] * out[p * step * head_dim + d];
    merged[d] = total > 0.0f || total != total ? sum / total : 0.0f;
  }
  write_floats(merged, head_dim, (char *)to, dtype);
  *to_lse = total > 0.0f || total != total ? top + __builtin_logf(total) : -INF;
}

void paged(const atb_paged_args *a);

// Elements from one kv head's keys to the next one's; strides of axes of one element say nothing.
static int64_t page_row(const atb_attention_args *a) {
  return a->kv_heads > 1 ? a->k_strides[1] : a->batch > 1 ? a->k_strides[0] : a->kv_len * a->head_dim;
}

// Whether one query a row reads keys that lie as in the pages of a cache (each row's in one page): then the
// kernel for them serves, whose vectors run along the channels.
static bool lies_in_pages(const atb_attention_args *a) {
  if (a->q_len != 1 || a->mask || a->reach || a->blocks || a->starts || a->causal == 2 || !a->kv_len)
    return false;
  const int64_t *k = a->k_strides, *v = a->v_strides, row = page_row(a), d = a->head_dim;
  if (row % d || row < a->kv_len * d || a->batch > INT32_MAX) return false;
  if (a->kv_len > 1 && (k[2] != d || v[2] != d)) return false;
  if (a->kv_heads > 1 && v[1] != row) return false;
  return a->batch == 1 || (k[0] == a->kv_heads * row && v[0] == k[0]);
}

static void attend_as_pages(const atb_attention_args *a) {
  int32_t *numbers =
      (int32_t *)malloc((3 * a->batch + 1) * sizeof(int32_t) + a->batch * a->heads * sizeof(float));
  int32_t *table = numbers, *lengths = numbers + a->batch, *starts = lengths + a->batch;
  float *lse = (float *)(starts + a->batch + 1);
  for (int64_t b = 0; b < a->batch; ++b)
    table[b] = (int32_t)b, lengths[b] = (int32_t)a->kv_len, starts[b] = (int32_t)b;
  starts[a->batch] = (int32_t)a->batch;
  atb_paged_args args = {};
  args.q = a->q, args.k_pages = a->k, args.v_pages = a->v, args.out = a->out, args.lse = lse;
  args.sinks = a->sinks, args.slopes = a->slopes;
  args.block_table = table, args.kv_lengths = lengths, args.cu_seqlens_q = starts;
  args.batch = args.total = a->batch, args.heads = a->heads, args.kv_heads = a->kv_heads;
  args.head_dim = a->head_dim, args.page_size = page_row(a) / a->head_dim, args.max_blocks = 1;
  args.q_token = a->q_strides[0], args.q_head = a->q_strides[1];
  args.left = a->left, args.right = a->right, args.scale = a->scale, args.softcap = a->softcap;
  args.dtype = args.page_dtype = a->dtype, args.causal = a->causal, args.threads = a->threads;
  paged(&args);
  for (int64_t b = 0; b < a->batch; ++b)
    for (int64_t h = 0; h < a->heads; ++h) a->lse[b * a->heads + h] = lse[h * a->batch + b];
  free(numbers);
}

void attention(const atb_attention_args *a) {
  if (lies_in_pages(a)) return attend_as_pages(a);
  const int64_t blocks = dense_blocks(a), units = a->batch * a->kv_heads, items = units * blocks;
  const int64_t parts = key_parts(a, items), size = Scratch::size(a->head_dim);
  const int threads = (int)max64(1, min64(a->threads, items * parts));
  const int64_t rows = parts > 1 ? items * parts * LANES : 0;
  float *scratch = (float *)malloc((size * threads + rows * (a->head_dim + 1)) * sizeof(float));
  float *part_out = scratch + size * threads, *part_lse = part_out + rows * a->head_dim;
  // The last blocks see the most keys of a causal call: they start first, so that no thread ends on a long
  // one.
  const auto fill = [&](Block &block, int64_t item) {
    fill_dense(a, block, item % units / a->kv_heads, item % units % a->kv_heads, blocks - 1 - item / units);
  };
  take_items(threads, items * parts, [&](int64_t work, int thread) {
    const int64_t item = work / parts, index = blocks - 1 - item / units, first = dense_first(a, index);
    const int64_t b = item % units / a->kv_heads, kv_head = item % units % a->kv_heads;
    Scratch s(scratch + thread * size, a->head_dim);
    Block block;
    fill(block, item);
    for (int lane = 0; lane < block.count; ++lane)
      set_query(s, lane, dense_query(a, b, dense_lane(a, kv_head, first, lane)), a->dtype, a->head_dim,
                a->scale);
    if (parts > 1) {
      take_part(block, work % parts, parts);
      block.dtype = ATB_F32;
      for (int lane = 0; lane < block.count; ++lane) {
        block.out[lane] = part_out + (work * LANES + lane) * a->head_dim;
        block.lse[lane] = part_lse + work * LANES + lane;
      }
    }
    flash_block(block, s, a->head_dim, a->softcap, dense_keys(a, b, kv_head));
  });
  if (parts > 1)
    take_items(threads, items, [&](int64_t item, int) {
      Block block;
      fill(block, item);
      for (int lane = 0; lane < block.count; ++lane) {
        const int64_t row = item * parts * LANES + lane;
        merge_parts(part_out + row * a->head_dim, part_lse + row, parts, LANES, a->head_dim, a->dtype,
                    block.out[lane], block.lse[lane]);
      }
    });
  free(scratch);
}

} // namespace ATB_ISA

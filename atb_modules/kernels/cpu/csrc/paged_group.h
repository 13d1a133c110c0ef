// One query token of each row against the pages: the heads of a group share each key and value that is read.
#pragma once
#include "threads.h"

namespace ATB_ISA {

// What the keys of all rows look like; shared by the paged op and the decode layer.
struct PagedKeys {
  const void *k_pages, *v_pages;
  const int32_t *block_table, *kv_lengths;
  int64_t batch, heads, kv_heads, head_dim, page_size, max_blocks, left;
  float softcap;
  const float *slopes, *sinks;
  const float *k_scales = nullptr, *v_scales = nullptr; // of int8 pages

  int64_t group() const { return heads / kv_heads; }
  int64_t first(int64_t b) const { return left < 0 ? 0 : max64(0, kv_lengths[b] - 1 - left); }
  int64_t visible(int64_t b) const { return max64(0, kv_lengths[b] - first(b)); }
  // Floats of one partial result: maximum and sum of each head, then the unnormalised outputs.
  int64_t partial_size() const { return group() * (vector_padded(head_dim) + 2); }
};

// Keys [begin, end) of row b and kv head h into one partial result; q (group, padded head_dim), scaled
// already.
void attend_range(const PagedKeys &s, int page_dtype, const float *q, int64_t b, int64_t h, int64_t begin,
                  int64_t end, float *partial);

// The same over int8 pages by products of bytes; false where it cannot, and has done nothing: a processor
// without AVX-512 VNNI, pages of fewer than 16 tokens, queries that are not finite.
bool attend_codes(const PagedKeys &s, const float *q, int64_t b, int64_t h, int64_t begin, int64_t end,
                  float *partial);

// Merges the partial results of unit (b, h) that `count` threads left: out (group, head_dim) float32, lse
// optional.
void combine(const PagedKeys &s, int count, const float *partials, int64_t b, int64_t h, float *out,
             float *lse);

ATB_INLINE int64_t total_keys(const PagedKeys &s) {
  int64_t total = 0;
  for (int64_t b = 0; b < s.batch; ++b) total += s.visible(b) * s.kv_heads;
  return total;
}

// The keys of all (row, kv head) units in one line, cut into equal shares: thread t works on its share and
// leaves the partial result of unit u in slot u + t. Slots are distinct, because the shares are contiguous.
// prepare(b, h, owns_last) returns the unit's scaled queries; owns_last: this thread reads the newest key.
template <class Prepare>
ATB_INLINE void attend_share(const PagedKeys &s, int page_dtype, int thread, int count, float *partials,
                             const Prepare &prepare) {
  const Range mine = share(total_keys(s), thread, count);
  int64_t at = 0, unit = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t n = s.visible(b), first = s.first(b);
    for (int64_t h = 0; h < s.kv_heads; ++h, ++unit, at += n) {
      const int64_t begin = max64(mine.begin - at, 0), end = min64(mine.end - at, n);
      if (begin >= end) continue;
      const float *q = prepare(b, h, end == n);
      attend_range(s, page_dtype, q, b, h, first + begin, first + end,
                   partials + (unit + thread) * s.partial_size());
    }
  }
}

} // namespace ATB_ISA

// Flash attention of one block of queries that share their keys: online softmax over tiles of keys.
#pragma once
#include "atb_cpu.h"
#include "flash_tile.h"

namespace ATB_ISA {

// A block: up to LANES queries of one kv head group. Lane i sees the keys [low[i], high[i]).
struct Block {
  int count = 0;
  int32_t low[LANES], high[LANES], position[LANES];
  float slope[LANES], sink[LANES];
  const void *mask[LANES];
  void *out[LANES];
  float *lse[LANES];

  bool has_slopes = false, has_sinks = false;
  int mask_dtype = -1; // -1: no mask; 3: bool; else added
  int64_t mask_key_stride = 0;
  bool mask_shared = false; // all lanes have the same mask row

  int vectors() const { return (count + W - 1) / W; }
};

// Memory of one thread, in floats.
struct Scratch {
  float *q, *out, *total, *score, *k, *v;
  static int64_t size(int64_t head_dim) { return 3 * head_dim * LANES + KEYS * LANES + 2 * KEYS * head_dim + 64; }
  Scratch(float *base, int64_t head_dim) {
    q = base;
    out = q + head_dim * LANES;
    total = out + head_dim * LANES;
    score = total + head_dim * LANES;
    k = score + KEYS * LANES;
    v = k + KEYS * head_dim;
  }
};

// Writes the scaled query of one lane into its column.
template <class T> ATB_INLINE void set_query(Scratch &s, int lane, const T *q, int64_t head_dim, float scale) {
  for (int64_t d = 0; d < head_dim; ++d) s.q[d * LANES + lane] = to_float(q[d]) * scale;
}

// float rows are used where they are; 16-bit rows are converted into the scratch tile.
ATB_INLINE const float *as_float_row(const float *row, float *, int64_t) { return row; }
template <class P> ATB_INLINE const float *as_float_row(const P *row, float *space, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(space + i, load(row + i));
  if (i < n) store_part(space + i, load_part(row + i, n - i), n - i);
  return space;
}

// Everything between the product and the softmax: softcap, ALiBi, mask, and the lanes' own key ranges.
void adjust_scores(const Block &b, float *score, int64_t begin, int64_t n, float softcap, bool ranged);

// Tiles whose sums are held apart before they join the totals: one long chain of additions over 65,536 keys would
// round a thousand times, two levels round sixty.
constexpr int64_t SUM_TILES = 32;

// Adds what the last tiles left in out and l to the totals and starts anew; m goes on.
void fold_sums(const Scratch &s, int vectors, int64_t head_dim, const float *m, float *l, float *total_m,
               float *total_l);

template <class T>
static void finish_block(const Block &b, const Scratch &s, const float *m, const float *l, int64_t head_dim) {
  for (int lane = 0; lane < b.count; ++lane) {
    float top = m[lane], total = l[lane], factor = 1.0f;
    if (b.has_sinks) {
      const float sink = b.sink[lane], with_sink = top > sink ? top : sink;
      factor = exp(set1(top - with_sink))[0];
      total = total * factor + exp(set1(sink - with_sink))[0];
      top = with_sink;
    }
    const bool any = total > 0.0f || total != total;
    const float scale = any ? factor / total : 0.0f;
    T *out = (T *)b.out[lane];
    float row[W];
    for (int64_t d = 0; d < head_dim; d += W) {
      const int64_t n = min64(W, head_dim - d);
      for (int64_t i = 0; i < n; ++i) row[i] = s.total[(d + i) * LANES + lane] * scale;
      if (n == W)
        store(out + d, load(row));
      else
        store_part(out + d, load_part(row, n), n);
    }
    if (b.lse[lane]) *b.lse[lane] = any ? top + __builtin_logf(total) : -INF;
  }
}

// keys(first, j) gives the pointers of key and value first + j. q has been set in the scratch.
template <class T, class P, class Keys>
static void flash_block(Block &b, Scratch &s, int64_t head_dim, float softcap, const Keys &keys) {
  const int vectors = b.vectors();
  int32_t begin = INT32_MAX, end = 0, all_low = 0, all_high = INT32_MAX;
  for (int i = 0; i < b.count; ++i) {
    const bool empty = b.low[i] >= b.high[i];
    if (!empty && b.low[i] < begin) begin = b.low[i];
    if (!empty && b.high[i] > end) end = b.high[i];
    if (b.low[i] > all_low) all_low = b.low[i];
    if (b.high[i] < all_high) all_high = b.high[i];
  }
  for (int i = b.count; i < vectors * W; ++i) { // unused lanes of the last vector
    b.low[i] = b.low[0];
    b.high[i] = b.high[0];
    b.position[i] = b.position[0];
    b.slope[i] = b.slope[0];
    for (int64_t d = 0; d < head_dim; ++d) s.q[d * LANES + i] = 0.0f;
  }
  alignas(64) float m[LANES], l[LANES], alpha[LANES], total_m[LANES], total_l[LANES];
  for (int i = 0; i < LANES; ++i) {
    m[i] = total_m[i] = -INF;
    l[i] = total_l[i] = 0.0f;
  }
  memset(s.total, 0, head_dim * LANES * sizeof(float));
  memset(s.out, 0, head_dim * LANES * sizeof(float));
  const float *k[KEYS], *v[KEYS];
  for (int64_t at = begin, tiles = 1; at < end; at += KEYS, ++tiles) {
    const int64_t n = min64(KEYS, end - at);
    for (int64_t j = 0; j < n; ++j) {
      const P *key, *value;
      keys(at + j, &key, &value);
      k[j] = as_float_row(key, s.k + j * head_dim, head_dim);
      v[j] = as_float_row(value, s.v + j * head_dim, head_dim);
    }
    scores_of(k, n, s.q, head_dim, vectors, s.score);
    const bool ranged = at < all_low || at + n > all_high;
    if (ranged || softcap > 0.0f || b.has_slopes || b.mask_dtype >= 0)
      adjust_scores(b, s.score, at, n, softcap, ranged);
    soften_tile(s.score, n, vectors, m, l, alpha);
    values_of(v, n, s.score, head_dim, vectors, alpha, s.out);
    if (tiles % SUM_TILES == 0) fold_sums(s, vectors, head_dim, m, l, total_m, total_l);
  }
  fold_sums(s, vectors, head_dim, m, l, total_m, total_l);
  finish_block<T>(b, s, m, total_l, head_dim);
}

} // namespace ATB_ISA

// The flash attention of one block: see flash_block.h.
#include "flash_block.h"

namespace ATB_ISA {

// Tiles whose sums are held apart before they join the totals: one long chain of additions over 65,536 keys
// would round a thousand times, two levels round sixty.
constexpr int64_t SUM_TILES = 32;

ATB_INLINE float mask_at(const Block &b, int lane, int64_t key) {
  const int64_t at = key * b.mask_key_stride;
  switch (b.mask_dtype) {
  case ATB_F32:
    return ((const float *)b.mask[lane])[at];
  case ATB_BF16:
    return to_float(((const bf16 *)b.mask[lane])[at]);
  case ATB_F16:
    return to_float(((const f16 *)b.mask[lane])[at]);
  default:
    return ((const uint8_t *)b.mask[lane])[at] ? 0.0f : -INF;
  }
}

// Everything between the product and the softmax: softcap, ALiBi, mask, and the lanes' own key ranges.
static void adjust_scores(const Block &b, float *score, int64_t begin, int64_t n, float softcap,
                          bool ranged) {
  const int vectors = b.vectors();
  if (softcap > 0.0f)
    for (int64_t j = 0; j < n; ++j)
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * STRIDE + v * W;
        store(s, softcap * tanh(load(s) / softcap));
      }
  if (b.has_slopes)
    for (int64_t j = 0; j < n; ++j)
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * STRIDE + v * W;
        vi distance = load_raw<vi>(b.position + v * W) - (int32_t)(begin + j);
        distance = distance < 0 ? -distance : distance;
        store(s, load(s) - load(b.slope + v * W) * __builtin_convertvector(distance, vf));
      }
  if (b.mask_dtype >= 0 && b.mask_shared) {
    for (int64_t j = 0; j < n; ++j) {
      const float m = mask_at(b, 0, begin + j);
      if (m == 0.0f) continue;
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * STRIDE + v * W;
        store(s, m == -INF ? set1(-INF) : load(s) + m);
      }
    }
  } else if (b.mask_dtype >= 0) {
    for (int lane = 0; lane < b.count; ++lane)
      for (int64_t j = 0; j < n; ++j) {
        const float m = mask_at(b, lane, begin + j);
        float *s = score + j * STRIDE + lane;
        *s = m == -INF ? -INF : *s + m;
      }
  }
  if (ranged)
    for (int64_t j = 0; j < n; ++j) {
      const vi key = (vi){} + (int32_t)(begin + j);
      for (int v = 0; v < vectors; ++v) {
        float *s = score + j * STRIDE + v * W;
        const vi seen = (key >= load_raw<vi>(b.low + v * W)) & (key < load_raw<vi>(b.high + v * W));
        store(s, seen ? load(s) : set1(-INF));
      }
    }
}

// Adds what the last tiles left in out and l to the totals and starts anew; m goes on.
static void fold_sums(const Scratch &s, int vectors, int64_t head_dim, const float *m, float *l,
                      float *total_m, float *total_l) {
  for (int v = 0; v < vectors; ++v) {
    const vf top = load(m + v * W);
    const vf factor = exp(load(total_m + v * W) - (top == set1(-INF) ? (vf){} : top));
    store(total_m + v * W, top);
    store(total_l + v * W, load(total_l + v * W) * factor + load(l + v * W));
    store(l + v * W, (vf){});
    for (int64_t d = 0; d < head_dim; ++d) {
      float *total = s.total + d * STRIDE + v * W, *out = s.out + d * STRIDE + v * W;
      store(total, load(total) * factor + load(out));
      store(out, (vf){});
    }
  }
}

void set_query(Scratch &s, int lane, const void *q, int dtype, int64_t head_dim, float scale) {
  read_floats(q, dtype, head_dim, s.k); // no key has been read yet
  for (int64_t d = 0; d < head_dim; ++d) s.q[d * STRIDE + lane] = s.k[d] * scale;
}

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
    float *row = s.k; // the last keys are used up
    for (int64_t d = 0; d < head_dim; ++d) row[d] = s.total[d * STRIDE + lane] * scale;
    write_floats(row, head_dim, b.out[lane], b.dtype);
    if (b.lse[lane]) *b.lse[lane] = any ? top + __builtin_logf(total) : -INF;
  }
}

void flash_block(Block &b, Scratch &s, int64_t head_dim, float softcap, const KeyRows &keys) {
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
    for (int64_t d = 0; d < head_dim; ++d) s.q[d * STRIDE + i] = 0.0f;
  }
  alignas(64) float m[LANES], l[LANES], alpha[LANES], total_m[LANES], total_l[LANES];
  for (int i = 0; i < LANES; ++i) {
    m[i] = total_m[i] = -INF;
    l[i] = total_l[i] = 0.0f;
  }
  memset(s.total, 0, head_dim * STRIDE * sizeof(float));
  memset(s.out, 0, head_dim * STRIDE * sizeof(float));
  const float *k[KEYS], *v[KEYS];
  for (int64_t at = begin, tiles = 1; at < end; at += KEYS, ++tiles) {
    const int64_t n = min64(KEYS, end - at);
    for (int64_t j = 0; j < n; ++j) {
      const char *key = keys.at(keys.k, keys.k_stride, at + j),
                 *value = keys.at(keys.v, keys.v_stride, at + j);
      if (keys.dtype == ATB_F32) { // read where they are
        k[j] = (const float *)key;
        v[j] = (const float *)value;
        continue;
      }
      read_floats(key, keys.dtype, head_dim, s.k + j * head_dim);
      read_floats(value, keys.dtype, head_dim, s.v + j * head_dim);
      k[j] = s.k + j * head_dim;
      v[j] = s.v + j * head_dim;
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
  finish_block(b, s, m, total_l, head_dim);
}

} // namespace ATB_ISA

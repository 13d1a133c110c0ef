// The inner loops of flash_tile.h.
#include "flash_tile.h"

namespace ATB_ISA {

constexpr int GROUP_VECTORS = W == 16 ? 4 : 2; // vectors of lanes whose accumulators are held at once
constexpr int TILE_ROWS = 6;

// score[i][lane] = k[i] . q[lane] for ROWS keys; q is (head_dim, LANES).
template <int ROWS, int VECTORS>
ATB_INLINE void score_tile(const float *const *k, const float *q, int64_t head_dim, float *score) {
  vf acc[ROWS][VECTORS] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    vf lane[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) lane[v] = load(q + d * STRIDE + v * W);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const vf key = set1(k[i][d]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[i][v] += key * lane[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store(score + i * STRIDE + v * W, acc[i][v]);
}

// out[i][lane] = out[i][lane] * alpha[lane] + sum over keys of v[key][i] * p[key][lane], for ROWS channels.
template <int ROWS, int VECTORS>
ATB_INLINE void value_tile(const float *const *value, int64_t channel, const float *p, int64_t keys,
                           const float *alpha, float *out) {
  vf acc[ROWS][VECTORS] = {};
  for (int64_t key = 0; key < keys; ++key) {
    const float *row = value[key] + channel;
    vf lane[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) lane[v] = load(p + key * STRIDE + v * W);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const vf x = set1(row[i]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[i][v] += x * lane[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      float *o = out + i * STRIDE + v * W;
      store(o, load(o) * load(alpha + v * W) + acc[i][v]);
    }
}

// Runs body<ROWS>(first) over n rows in tiles of TILE_ROWS, then smaller ones.
#define ATB_ROW_TILES(n, call)                                                                               \
  do {                                                                                                       \
    int64_t row = 0;                                                                                         \
    for (; row + TILE_ROWS <= (n); row += TILE_ROWS) {                                                       \
      call(TILE_ROWS);                                                                                       \
    }                                                                                                        \
    for (; row + 4 <= (n); row += 4) {                                                                       \
      call(4);                                                                                               \
    }                                                                                                        \
    for (; row + 2 <= (n); row += 2) {                                                                       \
      call(2);                                                                                               \
    }                                                                                                        \
    for (; row < (n); ++row) {                                                                               \
      call(1);                                                                                               \
    }                                                                                                        \
  } while (0)

template <int VECTORS>
static void score_lanes(const float *const *k, int64_t keys, const float *q, int64_t head_dim, float *score) {
#define ATB_CALL(R) score_tile<R, VECTORS>(k + row, q, head_dim, score + row * STRIDE)
  ATB_ROW_TILES(keys, ATB_CALL);
#undef ATB_CALL
}

template <int VECTORS>
static void value_lanes(const float *const *value, int64_t keys, const float *p, int64_t head_dim,
                        const float *alpha, float *out) {
#define ATB_CALL(R) value_tile<R, VECTORS>(value, row, p, keys, alpha, out + row * STRIDE)
  ATB_ROW_TILES(head_dim, ATB_CALL);
#undef ATB_CALL
}
#undef ATB_ROW_TILES

// Both products for all the vectors of lanes in use.
void scores_of(const float *const *k, int64_t keys, const float *q, int64_t head_dim, int vectors,
               float *score) {
  int v = 0;
  for (; v + GROUP_VECTORS <= vectors; v += GROUP_VECTORS)
    score_lanes<GROUP_VECTORS>(k, keys, q + v * W, head_dim, score + v * W);
  if (vectors - v == 3) score_lanes<3>(k, keys, q + v * W, head_dim, score + v * W);
  if (vectors - v == 2) score_lanes<2>(k, keys, q + v * W, head_dim, score + v * W);
  if (vectors - v == 1) score_lanes<1>(k, keys, q + v * W, head_dim, score + v * W);
}

void values_of(const float *const *value, int64_t keys, const float *p, int64_t head_dim, int vectors,
               const float *alpha, float *out) {
  int v = 0;
  for (; v + GROUP_VECTORS <= vectors; v += GROUP_VECTORS)
    value_lanes<GROUP_VECTORS>(value, keys, p + v * W, head_dim, alpha + v * W, out + v * W);
  if (vectors - v == 3) value_lanes<3>(value, keys, p + v * W, head_dim, alpha + v * W, out + v * W);
  if (vectors - v == 2) value_lanes<2>(value, keys, p + v * W, head_dim, alpha + v * W, out + v * W);
  if (vectors - v == 1) value_lanes<1>(value, keys, p + v * W, head_dim, alpha + v * W, out + v * W);
}

void soften_tile(float *score, int64_t n, int vectors, float *m, float *l, float *alpha) {
  for (int v = 0; v < vectors; ++v) {
    float *s = score + v * W;
    vf top0 = load(s), top1 = top0;
    int64_t j = 0;
    for (; j + 2 <= n; j += 2) {
      top0 = vmax(load(s + j * STRIDE), top0);
      top1 = vmax(load(s + (j + 1) * STRIDE), top1);
    }
    if (j < n) top0 = vmax(load(s + j * STRIDE), top0);
    const vf old = load(m + v * W), m_new = vmax(vmax(top0, top1), old);
    // A lane that has seen no key yet keeps -inf; subtracting it would be NaN.
    const vf shift = m_new == set1(-INF) ? (vf){} : m_new;
    vf total0 = {}, total1 = {};
    for (j = 0; j + 2 <= n; j += 2) {
      const vf a = exp(load(s + j * STRIDE) - shift), b = exp(load(s + (j + 1) * STRIDE) - shift);
      store(s + j * STRIDE, a);
      store(s + (j + 1) * STRIDE, b);
      total0 += a;
      total1 += b;
    }
    if (j < n) {
      const vf a = exp(load(s + j * STRIDE) - shift);
      store(s + j * STRIDE, a);
      total0 += a;
    }
    const vf factor = exp(old - shift);
    store(alpha + v * W, factor);
    store(m + v * W, m_new);
    store(l + v * W, load(l + v * W) * factor + (total0 + total1));
  }
}

} // namespace ATB_ISA

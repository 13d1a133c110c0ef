// Gradients of dense attention in one pass over the tiles of each block of queries: scores are computed again
// from the log-sum-exp, and each tile gives its part of dQ, dK and dV.
#include "dense_block.h"
#include "table.h"
#include "threads.h"
#include <stdlib.h>

namespace ATB_ISA {

constexpr int ROW_TILE = 6;
constexpr int COLUMN_VECTORS = W == 16 ? 4 : 2;

// Memory of one thread, in floats. Columns are (head_dim, LANES), rows (LANES, padded head_dim).
struct BackwardScratch {
  float *q, *d_out, *d_q, *q_rows, *d_out_rows, *p, *ds, *cap, *k, *v;
  static int64_t size(int64_t d) {
    return 3 * d * STRIDE + 2 * LANES * vector_padded(d) + 3 * KEYS * STRIDE + 2 * KEYS * vector_padded(d) +
           64;
  }
  BackwardScratch(float *base, int64_t d) {
    q = base;
    d_out = q + d * STRIDE;
    d_q = d_out + d * STRIDE;
    q_rows = d_q + d * STRIDE;
    d_out_rows = q_rows + LANES * vector_padded(d);
    p = d_out_rows + LANES * vector_padded(d);
    ds = p + KEYS * STRIDE;
    cap = ds + KEYS * STRIDE;
    k = cap + KEYS * STRIDE;
    v = k + KEYS * vector_padded(d);
  }
};

// c[i] (width floats) += sum over lanes of a[i][lane] * b[lane], for ROWS rows and VECTORS vectors.
template <int ROWS, int VECTORS>
ATB_INLINE void add_tile(const float *a, int64_t lanes, const float *b, int64_t stride, float *c,
                         int64_t width, int64_t columns) {
  vf acc[ROWS][VECTORS] = {};
  for (int64_t lane = 0; lane < lanes; ++lane) {
    vf row[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) row[v] = load(b + lane * stride + v * W);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const vf x = set1(a[i * STRIDE + lane]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[i][v] += x * row[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      float *to = c + i * width + v * W;
      const int64_t n = columns - v * W;
      if (n >= W)
        store(to, load(to) + acc[i][v]);
      else
        store_part(to, load_part(to, n) + acc[i][v], n);
    }
}

template <int VECTORS>
static void add_columns(const float *a, int64_t rows, int64_t lanes, const float *b, int64_t stride, float *c,
                        int64_t width, int64_t columns) {
  int64_t i = 0;
  for (; i + ROW_TILE <= rows; i += ROW_TILE)
    add_tile<ROW_TILE, VECTORS>(a + i * STRIDE, lanes, b, stride, c + i * width, width, columns);
  for (; i + 2 <= rows; i += 2)
    add_tile<2, VECTORS>(a + i * STRIDE, lanes, b, stride, c + i * width, width, columns);
  for (; i < rows; ++i) add_tile<1, VECTORS>(a + i * STRIDE, lanes, b, stride, c + i * width, width, columns);
}

// c (rows, width) += a (rows, lanes; STRIDE apart) times b (lanes, padded width).
static void add_product(const float *a, int64_t rows, int64_t lanes, const float *b, float *c,
                        int64_t width) {
  const int64_t stride = vector_padded(width);
  int64_t column = 0;
  for (; column + COLUMN_VECTORS * W <= stride; column += COLUMN_VECTORS * W)
    add_columns<COLUMN_VECTORS>(a, rows, lanes, b + column, stride, c + column, width, width - column);
  for (; column < stride; column += W)
    add_columns<1>(a, rows, lanes, b + column, stride, c + column, width, width - column);
}

// One row of any dtype, times scale, as a column and as a row.
static void place(const void *from, int dtype, int64_t head_dim, float scale, int lane, float *columns,
                  float *rows) {
  float *row = rows + lane * vector_padded(head_dim);
  read_floats(from, dtype, head_dim, row);
  for (int64_t d = 0; d < head_dim; ++d) columns[d * STRIDE + lane] = row[d] *= scale;
}

// Scores become weights exp(score - lse) in p, and the gradients of the products become those of the scores
// in ds.
static void soften_backward(const BackwardScratch &s, int64_t n, int vectors, const float *lse,
                            const float *delta, bool capped) {
  for (int v = 0; v < vectors; ++v) {
    const vf shift = load(lse + v * W), mean = load(delta + v * W);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = j * STRIDE + v * W;
      const vf p = exp(load(s.p + at) - shift);
      vf ds = p * (load(s.ds + at) - mean);
      if (capped) ds = ds * load(s.cap + at);
      store(s.p + at, p);
      store(s.ds + at, ds);
    }
  }
}

// The derivative of cap * tanh(x / cap) from its value.
static void cap_slopes(const float *score, int64_t n, int vectors, float softcap, float *slope) {
  for (int64_t j = 0; j < n; ++j)
    for (int v = 0; v < vectors; ++v) {
      const vf t = load(score + j * STRIDE + v * W) / softcap;
      store(slope + j * STRIDE + v * W, 1.0f - t * t);
    }
}

static void backward_block(const atb_attention_backward_args *g, const BackwardScratch &s, int64_t b,
                           int64_t kv_head, int64_t index, float *d_k, float *d_v) {
  const atb_attention_args *a = &g->forward;
  const int64_t head_dim = a->head_dim, size = element_size(a->dtype), first = dense_first(a, index);
  Block block;
  fill_dense(a, block, b, kv_head, index);
  alignas(64) float lse[LANES], delta[LANES], ones[LANES];
  for (int lane = 0; lane < LANES; ++lane) {
    ones[lane] = 1.0f;
    lse[lane] = INF; // of unused lanes: their weights are 0
    delta[lane] = 0.0f;
  }
  for (int lane = 0; lane < block.count; ++lane) {
    const Lane who = dense_lane(a, kv_head, first, lane);
    place(dense_query(a, b, who), a->dtype, head_dim, a->scale, lane, s.q, s.q_rows);
    const int64_t row = (b * a->q_len + who.i) * a->heads + who.head;
    place((const char *)g->d_out + row * head_dim * size, a->dtype, head_dim, 1.0f, lane, s.d_out,
          s.d_out_rows);
    read_floats(block.out[lane], a->dtype, head_dim, s.k); // no key has been read yet
    double sum = 0.0;
    for (int64_t d = 0; d < head_dim; ++d)
      sum += (double)s.k[d] * s.d_out_rows[lane * vector_padded(head_dim) + d];
    const float seen = *block.lse[lane];
    delta[lane] = (float)sum - (g->d_lse ? g->d_lse[block.lse[lane] - a->lse] : 0.0f);
    // A row without a key has only scores of -inf; their weights exp(-inf - inf) are 0.
    lse[lane] = seen == -INF ? INF : seen;
  }
  const int vectors = block.vectors();
  fill_unused_lanes(block, s.q, head_dim);
  for (int lane = block.count; lane < vectors * W; ++lane)
    for (int64_t d = 0; d < head_dim; ++d) s.d_out[d * STRIDE + lane] = 0.0f;
  memset(s.d_q, 0, head_dim * STRIDE * sizeof(float));
  const KeyRows keys = dense_keys(a, b, kv_head);
  const bool adjusted = block.has_slopes || block.mask_dtype >= 0, capped = a->softcap > 0.0f;
  const float *k[KEYS], *v[KEYS];
  Tile tile;
  for (Tiles tiles(block); tiles.next(tile);) {
    keys.read(tile.at, tile.n, head_dim, s.k, s.v, k, v);
    scores_of(k, tile.n, s.q, head_dim, vectors, s.p);
    if (capped) {
      cap_scores(s.p, tile.n, vectors, a->softcap);
      cap_slopes(s.p, tile.n, vectors, a->softcap, s.cap);
    }
    if (tile.ranged || adjusted) adjust_scores(block, tile, s.p);
    scores_of(v, tile.n, s.d_out, head_dim, vectors, s.ds);
    soften_backward(s, tile.n, vectors, lse, delta, capped);
    add_product(s.p, tile.n, block.count, s.d_out_rows, d_v + tile.at * head_dim, head_dim);
    add_product(s.ds, tile.n, block.count, s.q_rows, d_k + tile.at * head_dim, head_dim);
    values_of(k, tile.n, s.ds, head_dim, vectors, ones, s.d_q);
  }
  for (int lane = 0; lane < block.count; ++lane) {
    float *row = g->d_q + (block.lse[lane] - a->lse) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) row[d] = s.d_q[d * STRIDE + lane] * a->scale;
  }
}

// Each (batch row, kv head) is the work of `splits` threads, which take its blocks in turn and keep their own
// dK and dV: nothing is added in an order that hangs on who comes first.
void attention_backward(const atb_attention_backward_args *g) {
  const atb_attention_args *a = &g->forward;
  const int64_t units = a->batch * a->kv_heads, items = units * g->splits, blocks = dense_blocks(a);
  const int64_t size = BackwardScratch::size(a->head_dim), keys = a->kv_len * a->head_dim;
  const int threads = (int)max64(1, min64(a->threads, items));
  float *scratch = (float *)calloc(size * threads, sizeof(float)); // the padding of rows stays 0
  take_items(threads, items, [&](int64_t item, int thread) {
    const int64_t split = item / units, unit = item % units;
    const BackwardScratch s(scratch + thread * size, a->head_dim);
    for (int64_t block = split; block < blocks; block += g->splits)
      backward_block(g, s, unit / a->kv_heads, unit % a->kv_heads, block, g->d_k + item * keys,
                     g->d_v + item * keys);
  });
  free(scratch);
}

} // namespace ATB_ISA

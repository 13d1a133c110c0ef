// The inner loops of paged_group.h, compiled once for each page dtype.
#include "paged_group.h"
#include "atb_cpu.h"

namespace ATB_ISA {

constexpr int64_t CHUNK = 64; // keys whose scores are held at a time

// The sums of four vectors.
typedef float v4 __attribute__((vector_size(16)));
ATB_INLINE v4 sums(vf a, vf b, vf c, vf d) {
#if ATB_WIDTH == 16
#define ATB_HALVES(x, y)                                                                                     \
  (__builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +                   \
   __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  const vf ab = ATB_HALVES(a, b), cd = ATB_HALVES(c, d);
#undef ATB_HALVES
  const vf quarters =
      __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
      __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  const vf pairs = quarters + __builtin_shufflevector(quarters, quarters, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8,
                                                      9, 14, 15, 12, 13);
  return __builtin_shufflevector(pairs, pairs, 0, 4, 8, 12) +
         __builtin_shufflevector(pairs, pairs, 1, 5, 9, 13);
#elif ATB_WIDTH == 8
  const vf ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  const vf cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11) +
                __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
  const vf pairs = __builtin_shufflevector(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) +
                   __builtin_shufflevector(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
  return __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6) +
         __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7);
#else
  const vf ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const vf cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#endif
}

// Products of KEYS keys with the queries of G heads, a vector of partial sums each.
template <int G, int KEYS, class P>
ATB_INLINE void key_products(const float *q, int64_t q_stride, const P *k, int64_t head_dim,
                             vf (&acc)[G][KEYS]) {
  const int64_t whole = head_dim / W * W;
  for (int64_t d = 0; d < head_dim; d += W) {
    vf key[KEYS];
#pragma GCC unroll 4
    for (int j = 0; j < KEYS; ++j) // the padding of q is zero
      key[j] = d < whole ? load(k + j * head_dim + d) : load_part(k + j * head_dim + d, head_dim - d);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const vf query = load(q + g * q_stride + d);
#pragma GCC unroll 4
      for (int j = 0; j < KEYS; ++j) acc[g][j] += key[j] * query;
    }
  }
}

// What is read next, asked for while this is worked on: `step` elements for each key, so that the requests
// are spread over all of the work and memory is never idle.
template <class P> struct Ahead {
  const P *next; // null: nothing
  int64_t step;
};

template <class P> ATB_INLINE void fetch(const Ahead<P> &ahead, int64_t key, int64_t keys) {
  if (!ahead.next) return;
  const P *end = ahead.next + (key + keys) * ahead.step;
  for (const P *at = ahead.next + key * ahead.step; at < end; at += 64 / sizeof(P))
    __builtin_prefetch(at, 0, 2);
}

// score[g][j] = q[g] . k[j] for the heads of a tile and n keys that lie one after the other.
template <int G, class P>
ATB_INLINE void tile_scores(const float *q, int64_t q_stride, const P *k, const Ahead<P> &ahead, int64_t n,
                            int64_t head_dim, float *score) {
  constexpr int HEADS = W == 16 ? 4 : 2; // what the registers hold beside four keys
  if constexpr (G > HEADS) {
    tile_scores<HEADS>(q, q_stride, k, ahead, n, head_dim, score);
    tile_scores<G - HEADS>(q + HEADS * q_stride, q_stride, k, Ahead<P>{}, n, head_dim, score + HEADS * CHUNK);
    return;
  }
  int64_t j = 0;
  for (; j + 4 <= n; j += 4, k += 4 * head_dim) {
    fetch(ahead, j, 4);
    vf acc[G][4] = {};
    key_products<G, 4>(q, q_stride, k, head_dim, acc);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const v4 four = sums(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
      memcpy(score + g * CHUNK + j, &four, sizeof four);
    }
  }
  for (; j < n; ++j, k += head_dim) {
    vf acc[G][1] = {};
    key_products<G, 1>(q, q_stride, k, head_dim, acc);
    for (int g = 0; g < G; ++g) score[g * CHUNK + j] = sum(acc[g][0]);
  }
}

// out[g][d] = out[g][d] * alpha[g] + sum over j of p[g][j] * v[j][d], for VECTORS vectors of channels from d
// on.
template <int G, int VECTORS, class P>
ATB_INLINE void tile_values(const float *p, const P *v, const Ahead<P> &ahead, int64_t n, int64_t stride,
                            const float *alpha, float *out, int64_t out_stride) {
  vf acc[G][VECTORS] = {};
  for (int64_t j = 0; j < n; ++j) {
    fetch(ahead, j, 1);
    vf value[VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) value[i] = load(v + j * stride + i * W);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const vf weight = set1(p[g * CHUNK + j]);
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) acc[g][i] += weight * value[i];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) {
      float *o = out + g * out_stride + i * W;
      store(o, load(o) * alpha[g] + acc[g][i]);
    }
}

// The same for the last channels, fewer than a vector.
template <class P>
static void tail_values(int heads, const float *p, const P *v, int64_t n, int64_t stride, const float *alpha,
                        float *out, int64_t out_stride, int64_t channels) {
  for (int g = 0; g < heads; ++g) {
    vf acc = {};
    for (int64_t j = 0; j < n; ++j) acc += p[g * CHUNK + j] * load_part(v + j * stride, channels);
    store(out + g * out_stride, load(out + g * out_stride) * alpha[g] + acc);
  }
}

// The softmax of one chunk for one head: scores become weights, maximum and sum move on; returns the factor
// for what was accumulated before.
ATB_INLINE float soften(float *score, int64_t n, float softcap, float slope, int64_t distance, float *m,
                        float *l) {
  const int64_t padded_n = vector_padded(n);
  for (int64_t j = n; j < padded_n; ++j) score[j] = -INF;
  vf top = set1(-INF);
  for (int64_t j = 0; j < padded_n; j += W) {
    vf s = load(score + j);
    if (softcap > 0.0f) {
      const vf capped = softcap * tanh(s / softcap);
      s = s == set1(-INF) ? s : capped;
    }
    if (slope != 0.0f)
      for (int i = 0; i < W; ++i) s[i] -= slope * (float)(distance - j - i);
    store(score + j, s);
    top = vmax(s, top);
  }
  const float m_new = max(top) > *m ? max(top) : *m;
  const float shift = m_new == -INF ? 0.0f : m_new;
  vf total = {};
  for (int64_t j = 0; j < padded_n; j += W) {
    const vf weight = exp(load(score + j) - shift);
    store(score + j, weight);
    total += weight;
  }
  const float alpha = exp(set1(*m - shift))[0];
  *m = m_new;
  *l = *l * alpha + sum(total);
  return alpha;
}

ATB_INLINE void multiply(float *x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += W) store(x + i, load(x + i) * factor);
}

// A run of keys that lie in one page, with the scales of its codes, and the run after it to ask for.
template <class P> struct Chunk {
  const P *k, *v, *next_k, *next_v;
  float k_scale, v_scale;
  int64_t n, distance; // keys, and how far the first of them lies before the query
  int64_t tiles, tile; // of heads that share the run: how many, and which is worked on
};

template <int G, class P>
static void tile_chunk(const PagedKeys &s, const float *q, int64_t first_head, const Chunk<P> &c, float *m,
                       float *l, float *out) {
  constexpr bool CODES = sizeof(P) == 1;
  const int64_t stride = vector_padded(s.head_dim), n = c.n;
  alignas(64) float score[G * CHUNK];
  float alpha[G];
  const int64_t step = (s.head_dim + c.tiles - 1) / c.tiles;
  const Ahead<P> keys = {c.next_k ? c.next_k + c.tile * n * step : nullptr, step};
  tile_scores<G>(q, stride, c.k, keys, n, s.head_dim, score);
  for (int g = 0; g < G; ++g) {
    float *row = score + g * CHUNK;
    if (CODES) multiply(row, n, c.k_scale);
    alpha[g] =
        soften(row, n, s.softcap, s.slopes ? s.slopes[first_head + g] : 0.0f, c.distance, m + g, l + g);
    if (CODES) multiply(row, n, c.v_scale);
  }
  constexpr int VECTORS = W == 16 ? 4 : 2;
  const int64_t passes = max64(1, s.head_dim / (VECTORS * W)), part = (step + passes - 1) / passes;
  Ahead<P> values = {c.next_v ? c.next_v + c.tile * passes * n * part : nullptr, part};
  int64_t d = 0;
  for (; d + VECTORS * W <= s.head_dim; d += VECTORS * W) {
    tile_values<G, VECTORS>(score, c.v + d, values, n, s.head_dim, alpha, out + d, stride);
    if (values.next) values.next += n * part;
  }
  for (; d + W <= s.head_dim; d += W)
    tile_values<G, 1>(score, c.v + d, Ahead<P>{}, n, s.head_dim, alpha, out + d, stride);
  if (d < s.head_dim) tail_values(G, score, c.v + d, n, s.head_dim, alpha, out + d, stride, s.head_dim - d);
}

// Keys [begin, end) of row b and kv head h into one partial result; q (group, padded head_dim), scaled
// already.
template <class P>
static void attend_pages(const PagedKeys &s, const float *q, int64_t b, int64_t h, int64_t begin, int64_t end,
                         float *partial) {
  const int64_t group = s.group(), stride = vector_padded(s.head_dim);
  float *m = partial, *l = partial + group, *out = partial + 2 * group;
  for (int64_t g = 0; g < group; ++g) m[g] = -INF;
  memset(l, 0, (group + group * stride) * sizeof(float));
  const auto chunk_at = [&](int64_t at) {
    return min64(min64(CHUNK, s.page_size - at % s.page_size), end - at);
  };
  const auto head_at = [&](int64_t at) {
    return s.block_table[b * s.max_blocks + at / s.page_size] * s.kv_heads + h;
  };
  const auto place = [&](int64_t at) { return (head_at(at) * s.page_size + at % s.page_size) * s.head_dim; };
  for (int64_t at = begin; at < end;) {
    const int64_t n = chunk_at(at), start = place(at);
    Chunk<P> chunk = {(const P *)s.k_pages + start,
                      (const P *)s.v_pages + start,
                      nullptr,
                      nullptr,
                      1.0f,
                      1.0f,
                      n,
                      s.kv_lengths[b] - 1 - at,
                      (group + 3) / 4,
                      0};
    if (sizeof(P) == 1) chunk.k_scale = s.k_scales[head_at(at)], chunk.v_scale = s.v_scales[head_at(at)];
    // What comes next, if it is as long as this; every tile of heads asks for its part.
    if (at + n < end && chunk_at(at + n) >= n) {
      const int64_t after = place(at + n);
      chunk.next_k = (const P *)s.k_pages + after, chunk.next_v = (const P *)s.v_pages + after;
    }
    for (int64_t g = 0; g < group; ++chunk.tile) {
      const float *qg = q + g * stride;
      float *og = out + g * stride;
      const int64_t head = h * group + g, left = group - g;
      if (left >= 4)
        tile_chunk<4>(s, qg, head, chunk, m + g, l + g, og);
      else if (left == 3)
        tile_chunk<3>(s, qg, head, chunk, m + g, l + g, og);
      else if (left == 2)
        tile_chunk<2>(s, qg, head, chunk, m + g, l + g, og);
      else
        tile_chunk<1>(s, qg, head, chunk, m + g, l + g, og);
      g += min64(left, 4);
    }
    at += n;
  }
}

void attend_range(const PagedKeys &s, int page_dtype, const float *q, int64_t b, int64_t h, int64_t begin,
                  int64_t end, float *partial) {
  if (page_dtype == ATB_BF16)
    attend_pages<bf16>(s, q, b, h, begin, end, partial);
  else if (page_dtype == ATB_F16)
    attend_pages<f16>(s, q, b, h, begin, end, partial);
  else if (page_dtype == ATB_I8) {
    if (!attend_codes(s, q, b, h, begin, end, partial)) attend_pages<int8_t>(s, q, b, h, begin, end, partial);
  } else
    attend_pages<float>(s, q, b, h, begin, end, partial);
}

void combine(const PagedKeys &s, int count, const float *partials, int64_t b, int64_t h, float *out,
             float *lse) {
  const int64_t group = s.group(), stride = vector_padded(s.head_dim), n = s.visible(b);
  int64_t at = n * h;
  for (int64_t row = 0; row < b; ++row) at += s.visible(row) * s.kv_heads;
  const int64_t total = total_keys(s), unit = b * s.kv_heads + h;
  for (int64_t g = 0; g < group; ++g) {
    float *o = out + g * s.head_dim;
    float top = s.sinks ? s.sinks[h * group + g] : -INF, l = s.sinks ? 1.0f : 0.0f;
    memset(o, 0, s.head_dim * sizeof(float));
    for (int t = 0; t < count && n > 0; ++t) {
      const Range r = share(total, t, count);
      if (r.end <= at || r.begin >= at + n || r.begin >= r.end) continue;
      const float *partial = partials + (unit + t) * s.partial_size();
      const float m = partial[g], *po = partial + 2 * group + g * stride;
      const float m_new = m > top ? m : top, shift = m_new == -INF ? 0.0f : m_new;
      const float keep = exp(set1(top - shift))[0], add = exp(set1(m - shift))[0];
      l = l * keep + partial[group + g] * add;
      int64_t d = 0;
      for (; d + W <= s.head_dim; d += W) store(o + d, load(o + d) * keep + load(po + d) * add);
      for (; d < s.head_dim; ++d) o[d] = o[d] * keep + po[d] * add;
      top = m_new;
    }
    const float inverse = l > 0.0f || l != l ? 1.0f / l : 0.0f;
    for (int64_t d = 0; d < s.head_dim; ++d) o[d] *= inverse;
    if (lse) lse[g] = l > 0.0f || l != l ? top + __builtin_logf(l) : -INF;
  }
}

} // namespace ATB_ISA

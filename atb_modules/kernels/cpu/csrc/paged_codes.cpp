// One query token of each row over int8 pages by products of bytes (AVX-512 VNNI), four to a lane and exact
// in int32.
//
// A query is cut into two bytes, q = scale * (128 * high + low), and so are the weights of a chunk of keys
// relative to the largest of them: 15 and 16 bits, beside which the rounding of the codes is what counts.
// Keys are turned so that each lane has a key of its own, values so that each lane has a channel of its own;
// both are shared by all heads.
#include "paged_group.h"
#include <stdlib.h>

#if ATB_WIDTH == 16 && defined(__x86_64__)

#define ATB_VNNI __attribute__((target("avx512vnni")))
#define ATB_VNNI_INLINE static inline __attribute__((target("avx512vnni"), always_inline))

namespace ATB_ISA {

constexpr int64_t CHUNK = 64, LINE = 64; // keys at a time; channels in a vector of bytes
constexpr float WEIGHT = 65535.0f;       // what a weight of 1 is cut from

namespace {

// sum + four products of bytes in each lane, `offset` unsigned. Written out: GCC 12 copies the sum for the
// intrinsic.
ATB_VNNI_INLINE __m512i dot(__m512i sum, __m512i offset, __m512i code) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(offset), "v"(code));
  return sum;
}

ATB_INLINE __m512i dwords(const void *p) {
  return _mm512_loadu_si512(p);
}

// The queries of a group as bytes: `lines` vectors a head, the high bytes of all heads, then the low ones.
struct QueryCodes {
  int8_t *high, *low;
  float *scale;
  int32_t *high_sum, *low_sum; // 128 times the sums: what the offset of the keys' bytes adds
};

// False where a query is not finite.
bool encode(const float *q, int64_t group, int64_t head_dim, int64_t padded, const QueryCodes &codes) {
  const int64_t stride = vector_padded(head_dim);
  memset(codes.high, 0, 2 * group * padded);
  for (int64_t g = 0; g < group; ++g) {
    const float *row = q + g * stride;
    float largest = 0.0f, sum = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) {
      const float magnitude = __builtin_fabsf(row[d]);
      largest = magnitude > largest ? magnitude : largest;
      sum += row[d] - row[d]; // not zero for what is not finite
    }
    if (sum != 0.0f) return false;
    const float factor = largest > 1e-30f ? 16256.0f / largest : 0.0f;
    int32_t high_sum = 0, low_sum = 0;
    for (int64_t d = 0; d < head_dim; ++d) {
      const int32_t value = (int32_t)__builtin_lrintf(row[d] * factor), high = (value + 64) >> 7;
      codes.high[g * padded + d] = (int8_t)high;
      codes.low[g * padded + d] = (int8_t)(value - 128 * high);
      high_sum += high, low_sum += value - 128 * high;
    }
    codes.scale[g] = largest / 16256.0f;
    codes.high_sum[g] = 128 * high_sum, codes.low_sum[g] = 128 * low_sum;
  }
  return true;
}

// Sixteen vectors of sixteen dwords, turned.
ATB_INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88),
                  b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88), t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd), t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// n keys of head_dim codes; `next` are those of the chunk after it, asked for on the way. Laid out as
// [keys / 16][lines][16 dwords of channels][16 keys], with the sign bit turned over.
void turn_keys(const int8_t *k, const int8_t *next, int64_t n, int64_t head_dim, int64_t lines,
               int8_t *turned) {
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  for (int64_t first = 0; first < n; first += 16)
    for (int64_t line = 0; line < lines; ++line) {
      const int64_t channels = min64(LINE, head_dim - line * LINE);
      const __mmask64 mask = channels == LINE ? ~0ull : (1ull << channels) - 1;
      __m512i rows[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const int64_t at = (first + i) * head_dim + line * LINE;
        rows[i] = _mm512_maskz_loadu_epi8(first + i < n ? mask : 0, k + at);
        if (next) __builtin_prefetch(next + at, 0, 2);
      }
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i, turned += LINE)
        _mm512_store_si512(turned, _mm512_xor_si512(rows[i], sign));
    }
}

// n values: [keys / 4][lines][4 vectors][16 channels][4 keys]; lane 4 * l + j of vector i is channel 16 l + 4
// i + j.
void turn_values(const int8_t *v, const int8_t *next, int64_t n, int64_t head_dim, int64_t lines,
                 int8_t *turned) {
  for (int64_t first = 0; first < n; first += 4)
    for (int64_t line = 0; line < lines; ++line, turned += 4 * LINE) {
      const int64_t channels = min64(LINE, head_dim - line * LINE);
      const __mmask64 mask = channels == LINE ? ~0ull : (1ull << channels) - 1;
      __m512i row[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int64_t at = (first + i) * head_dim + line * LINE;
        row[i] = _mm512_maskz_loadu_epi8(first + i < n ? mask : 0, v + at);
        if (next) __builtin_prefetch(next + at, 0, 2);
      }
      const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
      const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), d = _mm512_unpackhi_epi8(row[2], row[3]);
      _mm512_store_si512(turned, _mm512_unpacklo_epi16(a, c));
      _mm512_store_si512(turned + LINE, _mm512_unpackhi_epi16(a, c));
      _mm512_store_si512(turned + 2 * LINE, _mm512_unpacklo_epi16(b, d));
      _mm512_store_si512(turned + 3 * LINE, _mm512_unpackhi_epi16(b, d));
    }
}

// Scores of 16 * KEYS turned keys for G heads.
template <int G, int KEYS>
ATB_VNNI_INLINE void code_scores(const QueryCodes &codes, int64_t head, int64_t padded, const int8_t *turned,
                                 float k_scale, float *score) {
  __m512i high[G][KEYS], low[G][KEYS];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
    for (int j = 0; j < KEYS; ++j) {
      high[g][j] = _mm512_set1_epi32(-codes.high_sum[head + g]);
      low[g][j] = _mm512_set1_epi32(-codes.low_sum[head + g]);
    }
  const int8_t *q_high = codes.high + head * padded, *q_low = codes.low + head * padded;
  for (int64_t d = 0; d < padded; d += 4) {
    __m512i key[KEYS];
#pragma GCC unroll 2
    for (int j = 0; j < KEYS; ++j) key[j] = dwords(turned + (j * padded + d) * 16);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      int32_t four_high, four_low;
      memcpy(&four_high, q_high + g * padded + d, 4), memcpy(&four_low, q_low + g * padded + d, 4);
      const __m512i qh = _mm512_set1_epi32(four_high), ql = _mm512_set1_epi32(four_low);
#pragma GCC unroll 2
      for (int j = 0; j < KEYS; ++j) {
        high[g][j] = dot(high[g][j], key[j], qh);
        low[g][j] = dot(low[g][j], key[j], ql);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
    for (int j = 0; j < KEYS; ++j) {
      const vf whole = (vf)_mm512_cvtepi32_ps(high[g][j]) * 128.0f + (vf)_mm512_cvtepi32_ps(low[g][j]);
      store(score + g * CHUNK + 16 * j, whole * (codes.scale[head + g] * k_scale));
    }
}

struct Factors {
  float before, chunk; // of what was accumulated before, and of the chunk's sums of bytes
};

// Lane g of the result: the sum or the largest of the lanes of v[g].
template <int G, bool LARGEST> ATB_INLINE vf reduced(const vf (&v)[G]) {
  vf part[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) part[g] = v[g < G ? g : 0];
  const auto join = [](__m512 a, __m512 b) { return LARGEST ? _mm512_max_ps(a, b) : _mm512_add_ps(a, b); };
  const __m512 a = (__m512)part[0], b = (__m512)part[1], c = (__m512)part[2], d = (__m512)part[3];
  const __m512 ab = join(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); // a b a b in each quarter
  const __m512 cd = join(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = join(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)); // a b c d
  const __m512 half = join(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  return (vf)join(half, _mm512_shuffle_f32x4(half, half, 0xb1));
}

// The weights of a chunk for G heads as two bytes each, relative to the largest; maxima m and sums l move on.
template <int G>
ATB_INLINE void soften_codes(float *score, int64_t n, float softcap, const float *slopes, int64_t distance,
                             float *m, float *l, uint8_t *high, uint8_t *low, Factors *factors) {
  const int64_t padded_n = vector_padded(n);
  vf tops[G], totals[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    float *row = score + g * CHUNK;
    for (int64_t j = n; j < padded_n; ++j) row[j] = -INF;
    vf top = set1(-INF);
    for (int64_t j = 0; j < padded_n; j += W) {
      vf s = load(row + j);
      if (softcap > 0.0f) s = s == set1(-INF) ? s : softcap * tanh(s / softcap);
      if (slopes)
        for (int i = 0; i < W; ++i) s[i] -= slopes[g] * (float)(distance - j - i);
      if (softcap > 0.0f || slopes) store(row + j, s);
      top = vmax(s, top);
    }
    tops[g] = top;
  }
  const __mmask16 heads = (1 << G) - 1;
  const vf none = set1(-INF), largest = reduced<G, true>(tops), old = (vf)_mm512_maskz_loadu_ps(heads, m);
  const vf now = largest > old ? largest : old, base = now == none ? (vf){} : now;
  const vf before = exp(old - base), here = exp(largest - base) * (1.0f / WEIGHT);
  const vf shift = largest == none ? (vf){} : largest;
  _mm512_mask_storeu_ps(m, heads, (__m512)now);
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    vf total = {}, codes = {};
    for (int64_t j = 0; j < padded_n; j += W) {
      const vf weight = exp(load(score + g * CHUNK + j) - shift[g]) * WEIGHT;
      const vi code = nearest(weight);
      total += weight, codes += (vf)_mm512_cvtepi32_ps((__m512i)code);
      _mm_storeu_si128((__m128i *)(high + g * CHUNK + j), _mm512_cvtepi32_epi8((__m512i)(code >> 8)));
      _mm_storeu_si128((__m128i *)(low + g * CHUNK + j), _mm512_cvtepi32_epi8((__m512i)code));
    }
    totals[g] = codes + total * 0.0f; // NaN of a score stays NaN, which its code would not
  }
  const vf sums = reduced<G, false>(totals), check = sums * 0.0f;
  _mm512_mask_storeu_ps(l, heads, (__m512)((vf)_mm512_maskz_loadu_ps(heads, l) * before + here * sums));
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) factors[g] = {before[g], here[g] + check[g]};
}

// out[g] = out[g] * before + chunk * sum over the chunk's keys of weight * value, for one line of channels.
template <int G>
ATB_VNNI_INLINE void code_values(const uint8_t *high, const uint8_t *low, const int8_t *turned, int64_t lines,
                                 int64_t n, const Factors *factors, float v_scale, float *out, int64_t stride,
                                 int64_t channels) {
  __m512i sum_high[G][4], sum_low[G][4];
#pragma GCC unroll 2
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum_high[g][i] = sum_low[g][i] = _mm512_setzero_si512();
  for (int64_t j = 0; j < n; j += 4, turned += 4 * LINE * lines) {
    __m512i value[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) value[i] = dwords(turned + i * LINE);
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g) {
      int32_t four_high, four_low;
      memcpy(&four_high, high + g * CHUNK + j, 4), memcpy(&four_low, low + g * CHUNK + j, 4);
      const __m512i ph = _mm512_set1_epi32(four_high), pl = _mm512_set1_epi32(four_low);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sum_high[g][i] = dot(sum_high[g][i], ph, value[i]);
        sum_low[g][i] = dot(sum_low[g][i], pl, value[i]);
      }
    }
  }
#pragma GCC unroll 2
  for (int g = 0; g < G; ++g) {
    __m512i x[4], y[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      x[i] = _mm512_castps_si512(
          (__m512)((vf)_mm512_cvtepi32_ps(sum_high[g][i]) * 256.0f + (vf)_mm512_cvtepi32_ps(sum_low[g][i])));
    const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xee), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    y[0] = _mm512_shuffle_i32x4(a, b, 0x88), y[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    y[2] = _mm512_shuffle_i32x4(c, d, 0x88), y[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
    const float factor = factors[g].chunk * v_scale;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if (i * W >= channels) break;
      float *o = out + g * stride + i * W;
      store(o, load(o) * factors[g].before + (vf)_mm512_castsi512_ps(y[i]) * factor);
    }
  }
}

struct Turned {
  const int8_t *keys, *values;
  float k_scale, v_scale;
  int64_t n, distance, lines;
};

template <int G>
ATB_VNNI void code_tile(const PagedKeys &s, const QueryCodes &codes, int64_t g, int64_t first_head,
                        const Turned &c, float *m, float *l, float *out) {
  const int64_t padded = c.lines * LINE, stride = vector_padded(s.head_dim);
  alignas(64) float score[G * CHUNK];
  alignas(64) uint8_t high[G * CHUNK], low[G * CHUNK];
  Factors factors[G];
  int64_t j = 0;
  for (; j + 16 < c.n; j += 32)
    code_scores<G, 2>(codes, g, padded, c.keys + j * padded, c.k_scale, score + j);
  if (j < c.n) code_scores<G, 1>(codes, g, padded, c.keys + j * padded, c.k_scale, score + j);
  soften_codes<G>(score, c.n, s.softcap, s.slopes ? s.slopes + first_head : nullptr, c.distance, m, l, high,
                  low, factors);
  constexpr int PAIR = G > 1 ? 2 : 1;
  for (int i = 0; i < G; i += PAIR)
    for (int64_t line = 0; line < c.lines; ++line)
      code_values<PAIR>(high + i * CHUNK, low + i * CHUNK, c.values + line * 4 * LINE, c.lines, c.n,
                        factors + i, c.v_scale, out + i * stride + line * LINE, stride, stride - line * LINE);
}

} // namespace

bool attend_codes(const PagedKeys &s, const float *q, int64_t b, int64_t h, int64_t begin, int64_t end,
                  float *partial) {
  static const bool vnni = __builtin_cpu_supports("avx512vnni");
  const int64_t group = s.group(), stride = vector_padded(s.head_dim);
  const int64_t lines = (s.head_dim + LINE - 1) / LINE, padded = lines * LINE;
  if (!vnni || s.page_size < 16) return false;
  char *memory =
      (char *)aligned_alloc(64, (2 * CHUNK * padded + 2 * group * padded + 12 * group + 63) / 64 * 64);
  int8_t *keys = (int8_t *)memory, *values = keys + CHUNK * padded, *bytes = values + CHUNK * padded;
  float *scale = (float *)(bytes + 2 * group * padded);
  int32_t *sums = (int32_t *)(scale + group);
  const QueryCodes codes = {bytes, bytes + group * padded, scale, sums, sums + group};
  if (!encode(q, group, s.head_dim, padded, codes)) {
    free(memory);
    return false;
  }
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
    const bool follows = at + n < end && chunk_at(at + n) >= n;
    const int64_t after = follows ? place(at + n) : 0;
    turn_keys((const int8_t *)s.k_pages + start, follows ? (const int8_t *)s.k_pages + after : nullptr, n,
              s.head_dim, lines, keys);
    turn_values((const int8_t *)s.v_pages + start, follows ? (const int8_t *)s.v_pages + after : nullptr, n,
                s.head_dim, lines, values);
    const Turned chunk = {
        keys, values, s.k_scales[head_at(at)], s.v_scales[head_at(at)], n, s.kv_lengths[b] - 1 - at, lines};
    for (int64_t g = 0; g < group;) {
      const int64_t head = h * group + g, left = group - g;
      float *og = out + g * stride;
      if (left >= 4)
        code_tile<4>(s, codes, g, head, chunk, m + g, l + g, og), g += 4;
      else if (left >= 2)
        code_tile<2>(s, codes, g, head, chunk, m + g, l + g, og), g += 2;
      else
        code_tile<1>(s, codes, g, head, chunk, m + g, l + g, og), g += 1;
    }
    at += n;
  }
  free(memory);
  return true;
}

} // namespace ATB_ISA

#else

namespace ATB_ISA {

bool attend_codes(const PagedKeys &, const float *, int64_t, int64_t, int64_t, int64_t, float *) {
  return false;
}

} // namespace ATB_ISA

#endif

// Float vectors of one instruction set's width, conversions from and to 16-bit floats, and elementary
// functions. GCC vector extensions, so that the same text compiles for every processor; intrinsics only where
// they pay.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define ATB_WIDTH 16
#elif defined(__AVX2__)
#define ATB_WIDTH 8
#else
#define ATB_WIDTH 4
#endif

#define ATB_INLINE static inline __attribute__((always_inline))

namespace ATB_ISA {

constexpr int W = ATB_WIDTH;
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef int8_t vb __attribute__((vector_size(W)));

// Distinct types for the two 16-bit floats, so that a template cannot confuse them.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr float INF = __builtin_inff();

ATB_INLINE int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
ATB_INLINE int64_t max64(int64_t a, int64_t b) {
  return a > b ? a : b;
}
// n rounded up to whole vectors.
ATB_INLINE int64_t vector_padded(int64_t n) {
  return (n + W - 1) / W * W;
}
ATB_INLINE vf set1(float x) {
  return x - (vf){};
}
ATB_INLINE vf vmax(vf a, vf b) {
  return a > b ? a : b;
}
ATB_INLINE vi as_int(vf a) {
  return (vi)a;
}
ATB_INLINE vf as_float(vi a) {
  return (vf)a;
}

template <class V, class T> ATB_INLINE V load_raw(const T *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

ATB_INLINE vf load(const float *p) {
  return load_raw<vf>(p);
}
ATB_INLINE void store(float *p, vf v) {
  memcpy(p, &v, sizeof v);
}

ATB_INLINE vf load(const bf16 *p) {
  return (vf)(__builtin_convertvector(load_raw<vh>(p), vu) << 16);
}

ATB_INLINE void store(bf16 *p, vf v) {
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu nan = (bits >> 16) | 0x40;
  const vh half = __builtin_convertvector((v == v) ? rounded : nan, vh);
  memcpy(p, &half, sizeof half);
}

ATB_INLINE vf load(const f16 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load_raw<__m256i>(p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(load_raw<__m128i>(p));
#else
  const vu h = __builtin_convertvector(load_raw<vh>(p), vu);
  const vu sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
  const vu normal = (magnitude << 13) + (112u << 23);
  const vu special = (magnitude << 13) | 0x7f800000u;
  const vu subnormal = (vu)(__builtin_convertvector((vi)magnitude, vf) * 0x1p-24f);
  const vu bits = magnitude >= 0x7c00 ? special : (magnitude < 0x400 ? subnormal : normal);
  return (vf)(bits | sign);
#endif
}

ATB_INLINE void store(f16 *p, vf v) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vu bits = (vu)v, sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  // Adding 0.5 shifts a subnormal's mantissa into place and rounds it on the way.
  const vu subnormal = (vu)((vf)magnitude + 0.5f) - 0x3f000000u;
  const vu normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
  const vu nan_bits = (vu){} + 0x7e00u, inf_bits = (vu){} + 0x7c00u;
  const vu special = magnitude > 0x7f800000u ? nan_bits : inf_bits;
  const vu result = magnitude >= 0x47800000u ? special : (magnitude < 0x38800000u ? subnormal : normal);
  const vh half = __builtin_convertvector(result | sign, vh);
#endif
  memcpy(p, &half, sizeof half);
}

// int8 codes; their scale is applied by the caller.
ATB_INLINE vf load(const int8_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  return __builtin_convertvector(__builtin_convertvector(load_raw<vb>(p), vi), vf);
#endif
}

// The nearest integer, ties to even. Not by adding a large number: that may be contracted with the product
// before it, which then is not rounded by itself.
ATB_INLINE vi nearest(vf v) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (vi)_mm_cvtps_epi32((__m128)v);
#else
  vi n;
  for (int i = 0; i < W; ++i) n[i] = (int32_t)__builtin_rintf(v[i]);
  return n;
#endif
}

// Rounds to the nearest code from -127 to 127.
ATB_INLINE void store(int8_t *p, vf v) {
  const vi n = nearest(v > 127.0f ? set1(127.0f) : (v < -127.0f ? set1(-127.0f) : v));
  const vb codes = __builtin_convertvector(n, vb);
  memcpy(p, &codes, sizeof codes);
}

// The first n (< W) elements; the rest is zero.
template <class T> ATB_INLINE vf load_part(const T *p, int64_t n) {
  T whole[W] = {};
  for (int64_t i = 0; i < n; ++i) whole[i] = p[i];
  return load(whole);
}

template <class T> ATB_INLINE void store_part(T *p, vf v, int64_t n) {
  T whole[W];
  store(whole, v);
  for (int64_t i = 0; i < n; ++i) p[i] = whole[i];
}

// Rounds to T and comes back: what a tensor of that dtype would hold.
template <class T> ATB_INLINE vf round_to(vf v) {
  T whole[W];
  store(whole, v);
  return load(whole);
}
template <> inline __attribute__((always_inline)) vf round_to<float>(vf v) {
  return v;
}

ATB_INLINE float to_float(float x) {
  return x;
}
ATB_INLINE float to_float(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
ATB_INLINE float to_float(f16 x) {
  return load_part(&x, 1)[0];
}
template <class T> ATB_INLINE void from_float(T *p, float x) {
  store_part(p, set1(x), 1);
}
template <> inline __attribute__((always_inline)) void from_float<float>(float *p, float x) {
  *p = x;
}

ATB_INLINE float sum(vf v) {
#if ATB_WIDTH == 16
  auto h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  auto q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#elif ATB_WIDTH == 8
  auto q = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  auto q = v;
#endif
  auto d = q + __builtin_shufflevector(q, q, 2, 3, 2, 3);
  return d[0] + d[1];
}

ATB_INLINE float max(vf v) {
  float m = v[0];
  for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// exp with a relative error near 1e-7: 2^n times a polynomial on [-ln2/2, ln2/2] (the Cephes coefficients).
// Below -87.33 the result is 0 (no subnormals), above 88.72 infinity, NaN stays NaN.
ATB_INLINE vf exp(vf x) {
  const vf magic = set1(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vf clamped = x < -87.3f ? set1(-87.3f) : (x > 88.3f ? set1(88.3f) : x);
  const vf shifted = clamped * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  vf r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = set1(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vf scale = (vf)(((vu)shifted << 23) + (127u << 23));
  const vf result = p * scale;
  return x < -87.3f ? (vf){} : (x > 88.3f ? set1(INF) : result);
}

// tanh without overflow and without cancellation near zero.
ATB_INLINE vf tanh(vf x) {
  const vf magnitude = (vf)((vu)x & 0x7fffffffu);
  const vf z = x * x;
  vf p = set1(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const vf small = x + x * z * p;
  const vf t = exp(-2.0f * magnitude);
  const vf large = (vf)((vu)((1.0f - t) / (1.0f + t)) | ((vu)x & 0x80000000u));
  return magnitude < 0.625f ? small : large;
}

// erfc(z) for z >= 0 with a relative error near 1.2e-7 everywhere (Numerical Recipes' Chebyshev fit).
ATB_INLINE vf erfc_positive(vf z) {
  const vf t = 1.0f / (1.0f + 0.5f * z);
  vf p = set1(0.17087277f);
  p = p * t + -0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t + -1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t + -0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t + -1.26551223f;
  return t * exp(p - z * z);
}

template <int KIND> ATB_INLINE vf activate(vf x) {
  if (KIND == 0) return x / (1.0f + exp(-x));
  if (KIND == 1) {
    const vf magnitude = (vf)((vu)x & 0x7fffffffu);
    const vf tail = 0.5f * x * erfc_positive(magnitude * 0.70710678118654752f);
    return x > 0.0f ? x - tail : tail;
  }
  if (KIND == 2) {
    const vf inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-inner));
  }
  const vf positive = x > 0.0f ? x : (x == x ? (vf){} : x);
  return positive * positive;
}

} // namespace ATB_ISA

// Streaming (non-temporal) stores, for outputs larger than what the caches keep: an ordinary store first
// reads the line that it is about to overwrite, and drives out lines that somebody may still want.
#pragma once
#include "simd.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ATB_ISA {

// Outputs from this size on do not stay in a core's second-level cache until they are read again.
constexpr int64_t STREAM_BYTES = int64_t(8) << 20;

// Whether an output of `total` elements in rows of `stride` may be written by `put<true>`: large, and every
// vector of every row aligned. Memory that is also an input is in the cache already and gains nothing.
template <class T>
ATB_INLINE bool may_stream(const T *out, int64_t total, int64_t stride, const void *input) {
#if defined(__SSE2__)
  const int64_t vector = W * sizeof(T);
  return total * (int64_t)sizeof(T) >= STREAM_BYTES && (uintptr_t)out % vector == 0 &&
         stride * (int64_t)sizeof(T) % vector == 0 && (const void *)out != input;
#else
  (void)out, (void)total, (void)stride, (void)input;
  return false;
#endif
}

// One vector to p; with STREAM p is aligned to its W elements.
template <bool STREAM, class T> ATB_INLINE void put(T *p, vf v) {
#if defined(__SSE2__)
  if (STREAM) {
    alignas(64) T whole[W];
    store(whole, v);
#if defined(__AVX512F__)
    if (sizeof whole == 64) return _mm512_stream_si512((__m512i *)p, load_raw<__m512i>(whole));
#endif
#if defined(__AVX2__)
    if (sizeof whole == 32) return _mm256_stream_si256((__m256i *)p, load_raw<__m256i>(whole));
#endif
    if (sizeof whole == 16) return _mm_stream_si128((__m128i *)p, load_raw<__m128i>(whole));
    return store(p, v);
  }
#endif
  store(p, v);
}

// Makes a thread's streamed stores visible before it says that it is done.
ATB_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

} // namespace ATB_ISA

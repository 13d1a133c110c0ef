// Products of a few activation rows with a weight matrix: every weight is read from memory once.
#pragma once
#include "threads.h"

namespace ATB_ISA {

// How a row of activations must lie so that a block of 2W weights can be multiplied without shuffling. bfloat16
// weights are loaded as 32-bit pairs: the even ones are the low halves shifted up, the odd ones the high halves.
template <class WT> struct Order {
  static constexpr bool paired = false;
};
template <> struct Order<bf16> {
  static constexpr bool paired = true;
};

ATB_INLINE int64_t padded(int64_t k) { return (k + 2 * W - 1) / (2 * W) * (2 * W); }

// Copies x (k floats) to out in the order that weights of type WT want, whole blocks of 2W; the tail stays plain.
template <class WT> ATB_INLINE void arrange(const float *x, float *out, int64_t k) {
  int64_t i = 0;
  if (Order<WT>::paired)
    for (; i + 2 * W <= k; i += 2 * W) {
      const vf a = load(x + i), b = load(x + i + W);
      float even[W], odd[W];
      for (int j = 0; j < W / 2; ++j) {
        even[j] = a[2 * j];
        odd[j] = a[2 * j + 1];
        even[W / 2 + j] = b[2 * j];
        odd[W / 2 + j] = b[2 * j + 1];
      }
      memcpy(out + i, even, sizeof even);
      memcpy(out + i + W, odd, sizeof odd);
    }
  if (i < k && x != out) memcpy(out + i, x + i, (k - i) * sizeof(float));
}

struct Pair {
  vf first, second;
};
ATB_INLINE Pair load_pair(const float *p) { return {load(p), load(p + W)}; }
ATB_INLINE Pair load_pair(const f16 *p) { return {load(p), load(p + W)}; }
ATB_INLINE Pair load_pair(const bf16 *p) {
  const vu both = load_raw<vu>(p);
  return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
}

// out[r * stride] = dot(x + r * x_stride, weight) for ROWS rows of activations and one row of weights.
template <int ROWS, class WT>
ATB_INLINE void dot_rows(const float *x, int64_t x_stride, const WT *weight, int64_t k, float *out) {
  constexpr int SETS = ROWS == 1 ? 4 : (ROWS == 2 ? 2 : 1);
  vf even[SETS][ROWS] = {}, odd[SETS][ROWS] = {};
  int64_t i = 0;
  for (; i + 2 * W * SETS <= k; i += 2 * W * SETS) {
#pragma GCC unroll 4
    for (int s = 0; s < SETS; ++s) {
      const Pair w = load_pair(weight + i + 2 * W * s);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        even[s][r] += w.first * load(x + r * x_stride + i + 2 * W * s);
        odd[s][r] += w.second * load(x + r * x_stride + i + 2 * W * s + W);
      }
    }
  }
  for (; i + 2 * W <= k; i += 2 * W) {
    const Pair w = load_pair(weight + i);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      even[0][r] += w.first * load(x + r * x_stride + i);
      odd[0][r] += w.second * load(x + r * x_stride + i + W);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    vf total = even[0][r] + odd[0][r];
    for (int s = 1; s < SETS; ++s) total += even[s][r] + odd[s][r];
    out[r] = sum(total);
  }
  for (; i < k; ++i) {
    const float w = to_float(weight[i]);
    for (int r = 0; r < ROWS; ++r) out[r] += w * x[r * x_stride + i];
  }
}

// store(row of x, column, value) for all rows of x and the columns [begin, end) of weight (n, k). x is arranged.
template <class WT, class Store>
ATB_INLINE void gemv(const float *x, int64_t rows, int64_t x_stride, const WT *weight, int64_t k,
                     int64_t weight_stride, int64_t begin, int64_t end, const Store &put) {
  for (int64_t n = begin; n < end; ++n) {
    const WT *w = weight + n * weight_stride;
    float out[4];
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      dot_rows<4>(x + r * x_stride, x_stride, w, k, out);
      for (int j = 0; j < 4; ++j) put(r + j, n, out[j]);
    }
    if (rows - r >= 2) {
      dot_rows<2>(x + r * x_stride, x_stride, w, k, out);
      for (int j = 0; j < 2; ++j) put(r + j, n, out[j]);
      r += 2;
    }
    if (r < rows) {
      dot_rows<1>(x + r * x_stride, x_stride, w, k, out);
      put(r, n, out[0]);
    }
  }
}

} // namespace ATB_ISA

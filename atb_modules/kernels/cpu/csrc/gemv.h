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

// out[r * out_stride + n] = x[r] . weight[n] + bias[n] for the rows of x and the columns [begin, end) of weight
// (n, k); bias optional. x is arranged.
template <class WT>
void gemv(const float *x, int64_t rows, int64_t x_stride, const WT *weight, int64_t k, int64_t weight_stride,
          int64_t begin, int64_t end, const float *bias, float *out, int64_t out_stride);

} // namespace ATB_ISA
